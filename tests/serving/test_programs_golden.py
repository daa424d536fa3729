"""The compiled programs against the goldens in float32, batched with unequal lengths."""

from dataclasses import replace

import numpy as np

from tests.serving.support import (
    NOBODY,
    POOL,
    WIDE,
    Step,
    assert_close,
    decode_batch,
    host_bits,
    log_softmax,
    poisoned,
    request,
    stacked,
    trimmed,
)
from tests.tolerances import FP32_LOGITS_ABS, REPLAY_LOGITS_ABS

PROMPTS = ("p5", "p37", "p96")


def golden(tokens: np.ndarray, logits: np.ndarray) -> Step:
    return Step(tokens, log_softmax(logits))


def generated(first: Step, following: Step, place: int) -> Step:
    return stacked([first, *(following.place(i) for i in range(len(following.token)))]).place(
        (slice(None), place)
    )


def test_encode_replay_decode(bench, goldens):
    """Layers after the last KV source on the last min(W, n) rows alone."""
    arrays = goldens("replay_fp32.npz")
    prompts = [trimmed(request(arrays[f"{p}.input_ids"], i)) for i, p in enumerate(PROMPTS)]
    cache, first = bench.prompt(bench.new_cache(), prompts)
    _, following = bench.greedy(cache, decode_batch(prompts), 8)
    for i, name in enumerate(PROMPTS):
        want = golden(arrays[f"{name}.decoder.tokens"], arrays[f"{name}.decoder.logits"])
        assert_close(generated(first, following, i), want, REPLAY_LOGITS_ABS)


def test_replay_after_a_prefix_hit(bench, goldens):
    """Rows begin at H - W in another slot; the global rows below H come from an exact encode."""
    arrays = goldens("replay_fp32.npz")
    cases = [("p37", 32), ("p96", 32), ("p96", 80)]
    prompts = [
        trimmed(
            request(
                arrays[f"{name}.input_ids"],
                slot=i + 3,
                pages=range(i * 8, i * 8 + 8),
                floor=hit - 16,
                write_from=hit,
            )
        )
        for i, (name, hit) in enumerate(cases)
    ]
    prefixes = [
        request(p.tokens[:hit], i, pages=p.pages)
        for i, (p, (_, hit)) in enumerate(zip(prompts, cases, strict=True))
    ]
    cache = bench.encode_prompts(poisoned(bench.new_cache()), prefixes, [WIDE] * 3, WIDE)
    before = host_bits(cache)
    suffixes = [replace(p, start=p.floor) for p in prompts]
    cache = bench.encode_prompts(cache, suffixes, [WIDE] * 3, WIDE)
    cache, first = bench.replay(cache, prompts)
    _assert_hits_untouched(before, host_bits(cache), prompts)
    _, following = bench.greedy(cache, decode_batch(prompts), 8)
    for i, (name, hit) in enumerate(cases):
        want = golden(arrays[f"{name}.hit{hit}.tokens"], arrays[f"{name}.hit{hit}.logits"])
        assert_close(generated(first, following, i), want, REPLAY_LOGITS_ABS)


def _assert_hits_untouched(before, after, prompts):
    pools = [path for path in before if ".pools" in path]
    assert len(pools) == 4
    for path in pools:
        for prompt in prompts:
            hit_pages = list(prompt.pages[: prompt.write_from // 16])
            assert before[path][hit_pages].tobytes() == after[path][hit_pages].tobytes()
        used = [page for p in prompts for page in p.pages[: -(-p.stop // 16)]]
        unused = sorted(set(range(POOL)) - set(used))
        assert (after[path][unused] == 0xFF).all()


def test_prefill_full_and_decode(bench, goldens):
    """Without replay: exact prefill in chunks, then twelve steps."""
    arrays = goldens("e2e_fp32.npz")
    prompts = [request(arrays[f"{p}.input_ids"], i) for i, p in enumerate(PROMPTS)]
    cache, first = bench.full(bench.new_cache(), [*prompts, NOBODY])
    _, following = bench.greedy(cache, decode_batch(prompts), 12)
    for i, name in enumerate(PROMPTS):
        logits = np.concatenate(
            [arrays[f"{name}.prefill_logits"][-1:], arrays[f"{name}.decode_logits"]]
        )
        want = golden(arrays[f"{name}.decode_tokens"], logits)
        assert_close(generated(first, following, i), want, FP32_LOGITS_ABS)


def test_replay_differs_from_full_prefill_beyond_the_window(bench, goldens):
    """Otherwise the tests above could not tell the two apart."""
    ids = goldens("e2e_fp32.npz")["p37.input_ids"]
    _, exact = bench.full(bench.new_cache(), [request(ids, 0)])
    _, replayed = bench.prompt(bench.new_cache(), [trimmed(request(ids, 0))])
    assert np.abs(exact.logprobs[0] - replayed.logprobs[0]).max() > 0.05
