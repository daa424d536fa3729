"""200 prompts of 128 tokens each, with and without drafts: the contract of equal text."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dsv41_jax.checkpoint.load import load_model
from pallas_kernels.numerics import Numerics
from serving.engine import Engine
from serving.request import Request
from serving.speculative import Speculation
from sharding.build import build_ops
from tests.serving.speculative.support import OPTIONS, Drafter, Propose, right_for_a_while
from tests.tolerances import SPECULATIVE_TIE, SPECULATIVE_TIE_95

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, SLOTS = 200, 128, 16


@pytest.fixture(scope="module")
def longer(tiny_dir, tmp_path_factory):
    """The golden checkpoint with room for a prompt before 128 tokens."""
    folder = tmp_path_factory.mktemp("longer")
    for path in tiny_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((tiny_dir / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 192
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, rng.integers(1, 60)) for _ in range(PROMPTS)]
    return [Request(tuple(prompt.tolist()), TOKENS, logprobs=2) for prompt in prompts]


def answers(model, ops, propose: Propose | None = None, *, plain: bool = False) -> tuple:
    """Results of all requests, and how many tokens a step gave."""
    options = replace(
        OPTIONS,
        slots=SLOTS,
        pages=SLOTS * 12,
        max_tokens=192,
        prefill=((SLOTS, 16),),
        decode=(SLOTS,),
        logprobs=2,
        prefix_cache=False,
        speculation=None if plain else Speculation(),
    )
    engine = Engine(model, ops, options)
    engine.warm_up()
    if propose is not None:
        Drafter(engine, propose)
    results = [sequence.result for sequence in engine.run(requests())]
    assert all(len(result.token_ids) == TOKENS for result in results)
    return results, engine.acceptance


def loaded(folder, name: str) -> tuple:
    numerics = Numerics.named(name)
    model = load_model(folder, numerics=numerics, speculation=True)
    return model, build_ops("tp1", numerics, "reference")


def often_right(results) -> Propose:
    texts = (result.token_ids for result in results)
    return right_for_a_while(dict(zip(requests(), texts, strict=True)), 0)


def gaps_of(want, got) -> list[float]:
    """Where texts first differ, how far apart the two best tokens of ``want`` were."""
    gaps = []
    for one, other in zip(want, got, strict=True):
        differ = np.not_equal(one.token_ids, other.token_ids)
        if differ.any():
            (_, best), (_, second) = one.logprobs[int(differ.argmax())].top
            gaps.append(best - second)
    return gaps


@pytest.mark.parametrize("own", [True, False])
def test_float32_texts_are_equal(longer, own):
    """With the model's own drafts, and with drafts that are often right."""
    model, ops = loaded(longer, "float32")
    want, _ = answers(model, ops, plain=True)
    got, seen = answers(model, ops, None if own else often_right(want))
    print(f"\n{seen.tokens_per_step:.3f} tokens a step, accepted {seen.by_position}")
    assert gaps_of(want, got) == []
    assert seen.tokens_per_step > (1 if own else 2)


def test_reference_texts(longer):
    """Equal within the bucket of the blocks, whatever is accepted. Plain decoding runs in another
    bucket: the number of texts that come to differ and their gaps are printed.
    """
    model, ops = loaded(longer, "reference")
    single, none = answers(model, ops, lambda sequence, position, n: [2] * n)
    blocks, many = answers(model, ops, often_right(single))
    assert none.tokens_per_step < 1.01 and many.tokens_per_step > 2
    assert gaps_of(single, blocks) == []
    gaps = gaps_of(answers(model, ops, plain=True)[0], blocks)
    middle, most, widest = np.quantile(gaps or [0], (0.5, 0.95, 1))
    print(f"\n{len(gaps)} of {PROMPTS} texts differ from plain decoding: top-2 gaps", end=" ")
    print(f"{middle:.3f} median, {most:.3f} at 95 %, {widest:.3f} widest")
    assert widest < SPECULATIVE_TIE and most < SPECULATIVE_TIE_95
