"""Prefill against decode, chunk sizes and buckets in float32: within 1e-5, equal tokens."""

from dataclasses import replace

import numpy as np
import pytest

from tests.serving.support import (
    NARROW,
    NOBODY,
    PLACES,
    SINGLE,
    WIDE,
    WINDOW,
    Step,
    assert_close,
    decode_batch,
    request,
    stacked,
    trimmed,
    with_tokens,
)
from tests.tolerances import ACROSS_BUCKETS_ABS

STEPS = 5
# 49 rows: the last chunk of one row follows 48, and 49 entries are more than 5 blocks of 4 hold.
LENGTH = 49
CHUNKS = [1, 2, 3, 7, WINDOW - 1, WINDOW, WINDOW + 1, LENGTH - 1, LENGTH]


@pytest.fixture(scope="module")
def exact(bench, tokens) -> Step:
    """The step after tokens[:n] by one full prefill, at index n; 0 is not a prompt."""
    lengths = list(range(1, 3 * WINDOW + STEPS + 1))
    steps = [Step(np.int32(-1), np.zeros(512, np.float32))]
    for i in range(0, len(lengths), PLACES):
        prompts = [request(tokens[:n], k) for k, n in enumerate(lengths[i : i + PLACES])]
        _, step = bench.full(bench.new_cache(), [*prompts, *[NOBODY] * (PLACES - len(prompts))])
        steps += [step.place(k) for k in range(len(prompts))]
    return stacked(steps)


# Every length of one to three windows, so every residue of window, page, candidate block and pair.
@pytest.mark.parametrize("shortest", range(1, 3 * WINDOW, PLACES))
def test_prefill_is_a_shorter_prefill_and_decode_steps(bench, tokens, exact, shortest):
    """prefill(n) == prefill(n - k) + k decode steps of the same tokens, k = 1 .. 5."""
    prompts = [request(tokens[: shortest + k], k) for k in range(PLACES)]
    cache, step = bench.full(bench.new_cache(), prompts)
    batch = decode_batch(prompts)
    for k in range(STEPS + 1):
        for i, prompt in enumerate(prompts):
            assert_close(step.place(i), exact.place(prompt.stop + k), ACROSS_BUCKETS_ABS)
        forced = {p.slot: int(tokens[p.stop + k]) for p in prompts}
        cache, decoded = bench.decode(with_tokens(cache, forced), batch)
        batch, step = decoded.batch, Step.of(decoded.sampled).place(0)


@pytest.mark.parametrize("shortest", range(1, WINDOW + 1, PLACES))
def test_replay_is_exact_up_to_one_window(bench, tokens, exact, shortest):
    prompts = [trimmed(request(tokens[: shortest + k], k)) for k in range(PLACES)]
    cache, step = bench.prompt(bench.new_cache(), prompts)
    batch = decode_batch(prompts)
    for k in range(3):
        for i, prompt in enumerate(prompts):
            assert_close(step.place(i), exact.place(prompt.stop + k), ACROSS_BUCKETS_ABS)
        forced = {p.slot: int(tokens[p.stop + k]) for p in prompts}
        cache, decoded = bench.decode(with_tokens(cache, forced), batch)
        batch, step = decoded.batch, Step.of(decoded.sampled).place(0)


def replayed(bench, prompts, chunks, count) -> Step:
    """The replay's step and three decode steps after it, [4, B]."""
    cache, first = bench.prompt(bench.new_cache(), prompts, chunks, count)
    _, rest = bench.greedy(cache, decode_batch(prompts), 3)
    return Step(
        np.concatenate([first.token[None], rest.token]),
        np.concatenate([first.logprobs[None], rest.logprobs]),
    )


def assert_places_equal(got: Step, want: Step, place: int) -> None:
    at = (slice(None), place)
    assert_close(got.place(at), want.place((slice(None), 0)), ACROSS_BUCKETS_ABS)


def assert_chunks_agree(bench, ids, batches) -> None:
    prompts = [trimmed(request(ids, k)) for k in range(PLACES)]
    want = replayed(bench, prompts, [len(ids)] * PLACES, WIDE)
    for count, chunks in batches:
        got = replayed(bench, prompts, chunks, count)
        for place in range(PLACES):
            assert_places_equal(got, want, place)


def test_replay_does_not_depend_on_the_chunks(bench, tokens):
    """Four chunk sizes side by side; the bucket of a chunk also changes."""
    small, large = [c for c in CHUNKS if c <= NARROW], [c for c in CHUNKS if c > NARROW]
    batches = [
        (SINGLE, [1] * PLACES),
        (NARROW, small[:PLACES]),
        (NARROW, [*small[PLACES:], 5, 13]),
        (WIDE, [*large, 3]),
    ]
    assert {c for _, chunks in batches for c in chunks} >= set(CHUNKS)
    assert_chunks_agree(bench, tokens[:LENGTH], batches)


@pytest.mark.parametrize("last", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1])
def test_replay_does_not_depend_on_the_last_chunk(bench, tokens, last):
    """Rows that the replay needs lie on both sides of the last chunk's start."""
    ids = tokens[: 32 + last]
    assert_chunks_agree(bench, ids, [(WIDE, [32, 16, 32 - 1, len(ids) - 1])])


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 6 * WINDOW + 1))
def test_replay_does_not_depend_on_the_chunks_at_any_length(bench, tokens, n):
    chunks = sorted({min(c, n) for c in (*CHUNKS, max(n - 1, 1), n)})
    prompts = [trimmed(request(tokens[:n], k)) for k in range(PLACES)]
    want = replayed(bench, prompts, [WIDE] * PLACES, WIDE)
    for i in range(0, len(chunks), PLACES):
        sizes = [min(c, WIDE) for c in (chunks[i : i + PLACES] + [1] * PLACES)[:PLACES]]
        got = replayed(bench, prompts, sizes, WIDE)
        for place in range(PLACES):
            assert_places_equal(got, want, place)


def test_full_prefill_does_not_depend_on_the_chunks(bench, tokens, exact):
    prompts = [request(tokens[:LENGTH], k) for k in range(PLACES)]
    _, step = bench.full(bench.new_cache(), prompts, [7, WINDOW + 1, LENGTH - 1, LENGTH])
    for place in range(PLACES):
        assert_close(step.place(place), exact.place(LENGTH), ACROSS_BUCKETS_ABS)


def test_replay_reads_its_own_rows_alone(bench, tokens):
    """Another place's longer prompt, its chunks and its end leave the carried rows alone."""
    short, long = trimmed(request(tokens[:20], 0)), trimmed(request(tokens[::-1][:90], 1))
    _, alone = bench.prompt(bench.new_cache(), [short])
    cache = bench.encode(bench.new_cache(), [short], WIDE)
    cache = bench.encode_prompts(cache, [NOBODY, long], [WIDE, 23], WIDE)
    _, step = bench.replay(cache, [short, long])
    assert_close(step.place(0), alone.place(0), 0)


def test_segments_without_rows_are_left_alone(bench, tokens):
    """A request whose last chunk is past may stay in the batch with an empty segment."""
    prompts = [trimmed(request(tokens[:5], 0)), trimmed(request(tokens[:40], 1))]
    _, want = bench.prompt(bench.new_cache(), prompts)
    cache = bench.encode(bench.new_cache(), prompts, WIDE)
    cache = bench.encode(cache, [replace(p, start=p.stop) for p in prompts], WIDE)
    _, got = bench.replay(cache, prompts)
    assert_close(got, want, 0)
