"""A request's result is bit-equal within its buckets, whatever shares batch, cache or past."""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from tests.serving.support import (
    NARROW,
    NOBODY,
    PAGE,
    PLACES,
    POOL,
    SLOTS,
    WIDE,
    Step,
    assert_bits_equal,
    decode_batch,
    host_bits,
    poisoned,
    request,
    trimmed,
    with_tokens,
)

NUMERICS = ["float32", pytest.param("reference", marks=pytest.mark.slow)]
STEPS = 3
SCATTERED = [17, 3, 44, 0, 29, 8, 31, 12]


@pytest.fixture(params=NUMERICS)
def any_bench(request, benches):
    return benches(request.param)


def run(bench, cache, prompts) -> tuple:
    """Chunks of 16 rows, replay and decode steps: the cache, and the steps [1 + STEPS, B]."""
    prompts = [trimmed(p) for p in prompts]
    cache, first = bench.prompt(cache, prompts, count=NARROW)
    cache, rest = bench.greedy(cache, decode_batch(prompts), STEPS)
    steps = Step(
        np.concatenate([first.token[None], rest.token]),
        np.concatenate([first.logprobs[None], rest.logprobs]),
    )
    return cache, steps


def at(steps: Step, place: int) -> Step:
    return steps.place((slice(None), place))


def four_prompts(tokens) -> list:
    return [request(tokens[k : k + n], k) for k, n in enumerate((21, 5, 48, 37))]


def test_alone_among_others_and_between_dead_places(any_bench, tokens):
    bench = any_bench
    prompts = four_prompts(tokens)
    _, together = run(bench, bench.new_cache(), prompts)
    for place, prompt in enumerate(prompts):
        _, first = run(bench, bench.new_cache(), [prompt])
        _, last = run(bench, bench.new_cache(), [NOBODY] * 3 + [prompt])
        assert_bits_equal(at(together, place), at(first, 0))
        assert_bits_equal(at(together, place), at(last, 3))


def test_slot_place_and_pages_do_not_matter(any_bench, tokens):
    """Every request elsewhere: other places, other slots, pages in no order."""
    bench = any_bench
    prompts = four_prompts(tokens)
    _, want = run(bench, bench.new_cache(), prompts)
    order = [2, 0, 3, 1]
    pages = np.random.default_rng(3).permutation(POOL).tolist()
    moved = [
        replace(prompts[k], slot=SLOTS - 1 - i, pages=tuple(pages[8 * i : 8 * i + 8]))
        for i, k in enumerate(order)
    ]
    _, got = run(bench, bench.new_cache(), moved)
    for i, k in enumerate(order):
        assert_bits_equal(at(got, i), at(want, k))


def test_runs_repeat_themselves(any_bench, tokens):
    """The first call of an executable equals the second."""
    bench = any_bench
    runs = [run(bench, bench.new_cache(), four_prompts(tokens))[1] for _ in range(2)]
    assert_bits_equal(*runs)


def test_nothing_unwritten_is_read(any_bench, tokens):
    """NaN and 0xFF in every row of every array; what belongs to nobody stays as it was."""
    bench = any_bench
    prompts = [replace(four_prompts(tokens)[3], pages=tuple(SCATTERED)), request(tokens[:2], 4)]
    _, want = run(bench, bench.new_cache(), prompts)
    cache = poisoned(bench.new_cache())
    before = host_bits(cache)
    cache, got = run(bench, cache, prompts)
    for place in range(2):
        assert_bits_equal(at(got, place), at(want, place))
    after = host_bits(cache)
    pages = {3: SCATTERED[: -(-(37 + STEPS) // PAGE)], 4: [prompts[1].pages[0]]}
    for path, bits in after.items():
        own = [*pages[3], *pages[4]] if ".pools" in path else list(pages)
        others = np.setdiff1d(np.arange(len(bits)), own)
        assert (bits[others] == before[path][others]).all(), path


def test_full_prefill_reads_nothing_unwritten(bench, tokens):
    prompts = [request(tokens[:37], 0), NOBODY, request(tokens[:1], 3)]
    _, want = bench.full(bench.new_cache(), [*prompts, NOBODY])
    _, got = bench.full(poisoned(bench.new_cache()), [*prompts, NOBODY])
    for place in (0, 2):
        assert_bits_equal(got.place(place), want.place(place))


def test_rows_store_their_own_entries_alone(bench, tokens):
    """Pages are written up to the last closed entry, byte for byte; the rest of a page stays."""
    n = 37
    cache = bench.encode(poisoned(bench.new_cache()), [request(tokens[:n], 0)], WIDE)
    for owner, pool in cache.pools.items():
        entries = n // bench.cfg.compress_ratios[owner]
        for leaf in jax.tree.leaves(pool):
            rows = np.asarray(leaf).reshape(-1, leaf.shape[-1])
            assert np.isfinite(rows[:entries]).all()
            assert np.isnan(rows[entries:]).all()


def test_slots_and_pages_are_reused_without_clearing(any_bench, tokens):
    """A long request leaves tags, rows, pairs and carries behind; a shorter one sees none."""
    bench = any_bench
    short = [request(tokens[k : k + n], k) for k, n in enumerate((19, 1, 33, 8))]
    _, want = run(bench, bench.new_cache(), short)
    long = [request(tokens[::-1][k:], k) for k in range(PLACES)]
    cache, _ = run(bench, bench.new_cache(), long)
    cache, got = run(bench, cache, short)
    assert_bits_equal(got, want)
    _, again = run(bench, cache, short)
    assert_bits_equal(again, want)


def test_one_executable_follows_its_metadata(bench, tokens):
    """Same shapes, other tables, lengths, slots, floors: nothing of the first call is left."""
    a = trimmed(request(tokens[:40], 0))
    b = trimmed(request(tokens[10:31], 5, pages=SCATTERED))
    _, want = run(bench, bench.new_cache(), [b])
    cache, _ = run(bench, bench.new_cache(), [a])
    _, got = run(bench, cache, [b])
    assert_bits_equal(at(got, 0), at(want, 0))
    floors = [0, 8, 16]
    steps = [bench.prompt(bench.new_cache(), [replace(a, floor=f)])[1].place(0) for f in floors]
    assert all((x.logprobs != y.logprobs).any() for x, y in pairwise(steps))


def test_decode_of_some_leaves_the_others_alone(bench, tokens):
    """Prefill of one request between decode steps of another, in slots of one cache."""
    a, b = trimmed(request(tokens[:20], 1)), trimmed(request(tokens[40:77], 2))
    _, want = run(bench, bench.new_cache(), [a])
    cache, first = bench.prompt(bench.new_cache(), [a], count=NARROW)
    batch, steps = decode_batch([a]), [first.place(0)]
    for k in range(STEPS):
        cache = bench.encode(cache, [replace(b, start=12 * k, stop=12 * k + 12)], NARROW)
        cache, decoded = bench.decode(cache, batch)
        batch = decoded.batch
        steps.append(Step.of(decoded.sampled).place((0, 0)))
    for k, step in enumerate(steps):
        assert_bits_equal(step, want.place((k, 0)))
    cache = bench.encode(cache, [replace(b, start=36)], NARROW)
    _, got = bench.replay(cache, [b])
    _, alone = bench.prompt(bench.new_cache(), [b], chunks=[12], count=NARROW)
    assert_bits_equal(got.place(0), alone.place(0))


def test_decode_steps_depend_on_the_token_that_is_fed(bench, tokens):
    prompt = trimmed(request(tokens[:20], 0))
    caches = [bench.prompt(bench.new_cache(), [prompt])[0] for _ in range(2)]
    fed = [with_tokens(cache, {0: token}) for cache, token in zip(caches, (5, 6), strict=True)]
    steps = [bench.greedy(cache, decode_batch([prompt]), 1)[1] for cache in fed]
    assert (steps[0].logprobs[0, 0] != steps[1].logprobs[0, 0]).any()
