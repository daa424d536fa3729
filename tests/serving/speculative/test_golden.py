"""Every DSpark block of the goldens, through the programs, whatever was accepted before it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from serving.batch import neutral_decode, neutral_sampling
from serving.buckets import Bucket
from tests.serving.speculative.support import LENGTH, OPTIONS, SLOTS
from tests.tolerances import FP32_LOGITS_ABS

NAMES, STEPS = ("p5", "p37", "p96"), 12
PAGES = OPTIONS.pages_per_request
VERIFY, DRAFT = Bucket(SLOTS, 1 + LENGTH, PAGES), Bucket(SLOTS, LENGTH, PAGES)


@pytest.fixture(scope="module")
def arrays(goldens):
    return goldens("e2e_fp32.npz")


class Fed:
    """The golden prompts, a slot each, fed token by token: exact in every layer."""

    def __init__(self, programs, prompts):
        self.programs, self.cache = programs, programs.new_cache()
        places = np.arange(SLOTS, dtype=np.int32)
        batch = neutral_decode(SLOTS, PAGES, OPTIONS.max_stop_ids)
        self.batch = replace(
            batch,
            slot=places,
            page_table=np.arange(SLOTS * PAGES, dtype=np.int32).reshape(SLOTS, PAGES),
            last_position=np.full(SLOTS, 127, np.int32),
        )
        self.sampling = neutral_sampling(SLOTS, OPTIONS.max_stop_ids, 300, 512)
        nothing = np.zeros((SLOTS, LENGTH), np.int32)
        for position in range(max(map(len, prompts))):
            fed = [slot for slot, ids in enumerate(prompts) if position < len(ids)]
            token = np.asarray(self.cache.last_token).copy()
            token[fed] = [prompts[slot][position] for slot in fed]
            self.cache = replace(self.cache, last_token=jnp.asarray(token))
            self.verify(nothing, 0, np.isin(places, fed))

    def verify(self, drafts: np.ndarray, allowed: int, active: np.ndarray) -> np.ndarray:
        batch = replace(self.batch, active=active)
        inputs = batch, self.sampling, drafts, np.full(SLOTS, allowed, np.int32)
        self.cache, verified = self.programs("verify", VERIFY, self.cache, *inputs)
        return np.asarray(verified.count)

    def draft(self, bucket: Bucket):
        return self.programs("draft", bucket, self.cache, self.batch)


@pytest.fixture(scope="module")
def programs(speculating):
    return speculating.make().executor.programs


@pytest.mark.parametrize("accept", [0, 2, LENGTH])
def test_drafts_and_confidence(programs, arrays, accept):
    fed = Fed(programs, [arrays[f"{name}.input_ids"] for name in NAMES])
    tokens = np.stack([arrays[f"{name}.decode_tokens"] for name in NAMES])
    count, active = len(NAMES), np.arange(SLOTS) < len(NAMES)
    compared, done = 0, 0
    while done + accept < STEPS:
        drafts = np.zeros((SLOTS, LENGTH), np.int32)
        drafts[:count, :accept] = tokens[:, done + 1 : done + 1 + accept]
        assert fed.verify(drafts, accept, active)[:count].tolist() == [1 + accept] * count
        done += 1 + accept
        block = fed.draft(DRAFT)
        for slot, name in enumerate(NAMES):
            want = arrays[f"{name}.draft_ids"][done - 1]
            assert int(np.asarray(fed.cache.last_token)[slot]) == want[0]
            np.testing.assert_array_equal(np.asarray(block.ids)[slot], want[1:])
            confidence = arrays[f"{name}.draft_conf"][done - 1]
            np.testing.assert_allclose(
                np.asarray(block.confidence)[slot], confidence, rtol=0, atol=FP32_LOGITS_ABS
            )
        compared += 1
    assert compared == STEPS // (1 + accept)


def test_a_shorter_draft_is_the_beginning_of_the_block(programs, arrays):
    """F22: the block runs whole, whatever is kept of it."""
    fed = Fed(programs, [arrays["p37.input_ids"]])
    short = replace(DRAFT, rows=2)
    programs.compile("draft", short)
    part, whole = fed.draft(short), fed.draft(DRAFT)
    np.testing.assert_array_equal(part.ids, np.asarray(whole.ids)[:, :2])
    want = np.asarray(whole.confidence)[:, :2]
    np.testing.assert_allclose(part.confidence, want, rtol=0, atol=FP32_LOGITS_ABS)
