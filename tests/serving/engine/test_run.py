"""Static batches from prompts to tokens: goldens, solo runs, random traffic."""

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from serving.engine import Engine
from serving.programs import Programs
from serving.request import Request
from tests.serving.engine.support import (
    OPTIONS,
    PAGE,
    SLOTS,
    WINDOW,
    ask,
    assert_same,
    run,
)
from tests.serving.support import log_softmax
from tests.tolerances import ACROSS_BUCKETS_ABS, FP32_LOGITS_ABS, REPLAY_LOGITS_ABS

LONGEST, TOP = OPTIONS.max_tokens, OPTIONS.logprobs


class Runs:
    """An engine whose ``generate`` gives the results of a batch."""

    def __init__(self, engines, **options):
        self.engine = engines.make(prefix_cache=False, **options)

    def generate(self, requests, on_token=None):
        return [sequence.result for sequence in self.engine.run(requests, on_token)]


@pytest.fixture(scope="module")
def runner(engines):
    return Runs(engines)


@pytest.fixture(scope="module")
def exact_runner(engines):
    """Chunks of several requests at once, every row through every layer."""
    return Runs(engines, replay=False, prefill=((SLOTS, WINDOW),))


@pytest.fixture
def idle(runner):
    """The engine, which must end with every page free and nothing compiled."""
    engine = runner.engine
    before = engine.compiles.count
    yield runner
    engine.check()
    assert engine.ranks[0].pool.free == engine.ranks[0].pool.pages == OPTIONS.pages
    assert engine.compiles.count == before


def assert_logprobs(result, logits, tolerance):
    want = log_softmax(logits)
    for token, row in zip(result.logprobs, want, strict=True):
        ids, values = zip(*token.top, strict=True)
        assert len(ids) == TOP and token.top[0] == (token.token_id, token.logprob)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=tolerance)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:TOP], rtol=0, atol=tolerance)


def test_replay_against_the_goldens(idle, goldens):
    """Prompts of 5, 37 and 96 tokens in one batch; short ones wait for the long one's chunks."""
    arrays = goldens("replay_fp32.npz")
    names = ("p5", "p37", "p96")
    prompts = [tuple(arrays[f"{name}.input_ids"].tolist()) for name in names]
    results = idle.generate([Request(prompt, 9, logprobs=TOP) for prompt in prompts])
    for name, prompt, result in zip(names, prompts, results, strict=True):
        assert result.token_ids == arrays[f"{name}.decoder.tokens"].tolist()
        assert_logprobs(result, arrays[f"{name}.decoder.logits"], REPLAY_LOGITS_ABS)
        assert result.finish_reason == "length" and result.cached_tokens == 0
        assert result.encoder_rows == len(prompt)
        assert result.decoder_rows == min(len(prompt), WINDOW)


def test_full_prefill_against_the_goldens(exact_runner, goldens):
    arrays = goldens("e2e_fp32.npz")
    names = ("p96", "p5", "p37")
    prompts = [tuple(arrays[f"{name}.input_ids"].tolist()) for name in names]
    before = exact_runner.engine.compiles.count
    results = exact_runner.generate([Request(prompt, 13, logprobs=TOP) for prompt in prompts])
    assert exact_runner.engine.compiles.count == before
    for name, prompt, result in zip(names, prompts, results, strict=True):
        assert result.token_ids == arrays[f"{name}.decode_tokens"].tolist()
        logits = arrays[f"{name}.prefill_logits"][-1:], arrays[f"{name}.decode_logits"]
        assert_logprobs(result, np.concatenate(logits), FP32_LOGITS_ABS)
        assert result.encoder_rows == result.decoder_rows == len(prompt)


def random_requests(rng, count):
    lengths = rng.choice([1, 9, 12, 15, 16, 17, 30, 32, 33, 47, 48, 64, 96], count)
    return [
        Request(
            tuple(rng.integers(3, 500, n).tolist()),
            int(rng.integers(1, 9)),
            temperature=float(rng.choice([0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([0.8, 1.0])),
            seed=int(rng.integers(2**32)),
        )
        for n in lengths
    ]


def test_random_traffic_equals_solo_runs_and_compiles_nothing(idle):
    rng = np.random.default_rng(4)
    for _ in range(6):
        requests = random_requests(rng, rng.integers(1, SLOTS + 1))
        together = idle.generate(requests)
        for request_, result in zip(requests, together, strict=True):
            alone = idle.generate([request_])[0]
            assert result.token_ids == alone.token_ids
            assert len(result.token_ids) == request_.max_new_tokens
            got, want = ([t.logprob for t in r.logprobs] for r in (result, alone))
            np.testing.assert_allclose(got, want, rtol=0, atol=ACROSS_BUCKETS_ABS)


def test_another_batch_size_gives_the_same(engines, engine, tokens, monkeypatch):
    """Two of four requests once more, in decode steps of two."""
    asked = [ask(tokens[n : 2 * n], 5) for n in (37, 48, 9, 20)]
    together = run(engine, asked)
    pair, call, sizes = engines.make(decode=(2, SLOTS)), Programs.__call__, set()

    def watch(programs, name, bucket, cache, *inputs):
        if name == "decode":
            sizes.add(bucket.requests)
        return call(programs, name, bucket, cache, *inputs)

    monkeypatch.setattr(Programs, "__call__", watch)
    for got, want in zip(run(pair, asked[:2]), together, strict=False):
        assert_same(got.result, want.result)
        a, b = (
            np.array([[value for _, value in token.top] for token in sequence.result.logprobs])
            for sequence in (got, want)
        )
        np.testing.assert_allclose(a, b, rtol=0, atol=ACROSS_BUCKETS_ABS)
    assert sizes == {2}


def test_tokens_arrive_in_order_and_as_they_are_read(idle, tokens):
    seen = []
    requests = [Request(tuple(tokens[:n].tolist()), new) for n, new in ((16, 5), (33, 1), (9, 3))]
    results = idle.generate(requests, on_token=lambda i, e: seen.append((i, e.token.token_id)))
    for i, result in enumerate(results):
        assert [token for index, token in seen if index == i] == result.token_ids
        assert result.ttft_ms > 0 and (result.tpot_ms > 0) == (len(result.token_ids) > 1)
    first = {index: [i for i, _ in seen].index(index) for index in range(3)}
    assert first[1] < len(seen) - 1  # not at the end, with all the others


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_stop_ids_end_a_request(idle, tokens, stop_at):
    """The first, second or fourth token as the stop id, beside a request that goes on."""
    a, b = tuple(tokens[:16].tolist()), tuple(tokens[20:53].tolist())
    free = [r.token_ids for r in idle.generate([Request(a, 6), Request(b, 6)])]
    stop = free[0][stop_at]
    end = free[0].index(stop) + 1
    assert stop not in free[1]
    results = idle.generate([Request(a, 6, stop_ids=(499, stop)), Request(b, 6)])
    assert results[0].token_ids == free[0][:end] and results[0].finish_reason == "stop"
    assert results[1].token_ids == free[1] and results[1].finish_reason == "length"


def test_the_longest_request_that_fits(idle, tokens):
    """Prompt and new tokens fill every page."""
    result = idle.generate([Request(tuple(tokens[:96].tolist()), LONGEST - 96)])[0]
    assert len(result.token_ids) == LONGEST - 96


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([Request((1,), LONGEST)], f"must fit max_position_embeddings={LONGEST}"),
        ([Request((1,), 1, stop_ids=tuple(range(9)))], "stop_ids: 9 must be at most 8"),
        ([Request((1,), 1), Request((512,), 1)], "token id 512"),
    ],
    ids=["too long", "stop ids", "bad id"],
)
def test_bad_batches_are_refused_before_anything_runs(idle, requests, words):
    with pytest.raises(UserError, match=words):
        idle.generate(requests, on_token=lambda *_: pytest.fail("a token was generated"))


def test_pages_come_back_when_the_reader_fails(idle, tokens):
    def fail(_index, _token):
        raise RuntimeError("reader is gone")

    prompt = Request(tuple(tokens[:16].tolist()), 4)
    want = idle.generate([prompt])[0].token_ids
    with pytest.raises(RuntimeError, match="reader is gone"):
        idle.generate([prompt], on_token=fail)
    assert idle.generate([prompt])[0].token_ids == want


def test_capacity_and_array_extent_are_one_number(engines):
    engine = Engine(engines.model, engines.ops, OPTIONS)
    assert engine.ranks[0].pool.pages == OPTIONS.pages
    for owner, pool in engine.executor.cache.pools.items():
        ratio = engine.cfg.compress_ratios[owner]
        assert pool.latents.values.shape[:2] == (engine.ranks[0].pool.pages, PAGE // ratio)
