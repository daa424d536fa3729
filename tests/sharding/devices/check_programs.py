"""The serving programs on layouts: replay, several steps in one dispatch, stops, decisions."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.cache import CacheShape
from dsv41_jax.checkpoint.load import load_model
from pallas_kernels.numerics import FLOAT32
from serving.batch import build_rows, neutral_sampling
from serving.programs import Bucket, DecodeBatch, Programs
from sharding.build import build_ops
from tests.compare import assert_abs
from tests.conftest import GOLDENS
from tests.serving.support import Step, log_softmax, request, trimmed
from tests.sharding.devices.support import Placed, perturbed
from tests.tolerances import SHARDED_ABS

PLACES, PAGES, WINDOW, VOCAB = 3, 8, 16, 512
SHAPE = CacheShape(PLACES, PLACES * PAGES, 16)
# Requests of each data rank.
PROMPTS = (("p37", "p5"), (), ("p5",), ("p37",))


def golden(name):
    with np.load(GOLDENS / "replay_fp32.npz") as file:
        return tuple(
            file[f"{name}.{key}"] for key in ("input_ids", "decoder.tokens", "decoder.logits")
        )


def programs_of(name):
    placed = Placed.of(name)
    options = {"logprobs": VOCAB, "max_stop_ids": 1, "placement": placed.placement}
    return Programs(placed.model, placed.ops, SHAPE, **options)


def stacked(parts):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


class Run:
    """Golden prompts of every rank, encoded whole, replayed and decoded."""

    def __init__(self, programs):
        self.programs = programs
        self.names = [PROMPTS[rank % len(PROMPTS)] for rank in range(programs.ranks)]
        self.goldens = [[golden(name) for name in names] for names in self.names]
        self.prompts = [
            [trimmed(request(ids, PLACES - 1 - i)) for i, (ids, _, _) in enumerate(mine)]
            for mine in self.goldens
        ]
        self.sampling = stacked([neutral_sampling(PLACES, 1, None)] * programs.ranks)

    def call(self, name, rows, cache, *inputs, steps=1):
        bucket = Bucket(PLACES, rows, PAGES, steps)
        self.programs.compile(name, bucket)
        return self.programs(name, bucket, cache, *inputs)

    def rows(self, ranks, count):
        bucket = Bucket(PLACES, count, PAGES)
        return stacked([build_rows(mine, bucket, 3) for mine in ranks])

    def prompt(self, cache):
        """The cache after the prompts, and the first tokens [ranks * PLACES]."""
        for start in range(0, 48, WINDOW):
            chunk = [
                [
                    replace(p, start=min(start, p.stop), stop=min(start + WINDOW, p.stop))
                    for p in mine
                ]
                for mine in self.prompts
            ]
            cache = self.call("encode", WINDOW, cache, self.rows(chunk, WINDOW))
        tails = [[replace(p, start=max(p.stop - WINDOW, 0)) for p in mine] for mine in self.prompts]
        return self.call("replay", WINDOW, cache, self.rows(tails, WINDOW), self.sampling)

    def batch(self):
        ranks = [self._batch(mine) for mine in self.prompts]
        return stacked(ranks)

    def _batch(self, prompts):
        zeros = np.zeros(PLACES, np.int32)
        batch = DecodeBatch(
            slot=zeros.copy(),
            position=zeros.copy(),
            active=np.zeros(PLACES, bool),
            page_table=np.full((PLACES, PAGES), -1, np.int32),
            floor=zeros.copy(),
            decoder_floor=zeros.copy(),
            stop_ids=np.full((PLACES, 1), -1, np.int32),
            last_position=zeros.copy(),
        )
        for i, prompt in enumerate(prompts):
            batch.slot[i], batch.position[i], batch.active[i] = prompt.slot, prompt.stop, True
            batch.page_table[i] = prompt.pages
            batch.decoder_floor[i] = prompt.decoder_floor
            # Every request stops elsewhere: ranks do not run dry together.
            batch.last_position[i] = prompt.stop + 1 + i
        return batch

    def check(self, step, sampled):
        """A step's tokens and scores against the goldens, place by place."""
        found = Step.of(sampled)
        for rank, mine in enumerate(self.goldens):
            for i, (_, tokens, logits) in enumerate(mine):
                place = rank * PLACES + i
                assert found.token[place] == tokens[step]
                assert_abs(found.logprobs[place], log_softmax(logits[step]), SHARDED_ABS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dep4", "tp8", "tp2xdep2"])
def test_prompt_and_decode(name):
    """Ranks that have stopped, or never had a request, go on with the others."""
    run = Run(programs_of(name))
    cache, first = run.prompt(run.programs.new_cache())
    run.check(0, first)
    cache, decoded = run.call("decode", 1, cache, run.batch(), run.sampling, steps=3)
    active = np.asarray(decoded.active)
    sampled = jax.tree.map(np.asarray, decoded.sampled)
    run.check(1, jax.tree.map(lambda leaf: leaf[0], sampled))
    want = np.zeros((3, run.programs.ranks, PLACES), bool)
    for rank, mine in enumerate(run.prompts):
        for i in range(len(mine)):
            want[: i + 1, rank, i] = True
    np.testing.assert_array_equal(active, want.reshape(3, -1))
    assert not np.asarray(decoded.batch.active).any()


@pytest.mark.slow
def test_ranks_decide_as_the_first():
    """Scores that are off on every rank but the first change no token and no later step."""
    placed = Placed.of("tp2")
    options = {"logprobs": VOCAB, "max_stop_ids": 1, "placement": placed.placement}
    run = Run(Programs(placed.model, perturbed(placed.ops, 0.5), SHAPE, **options))
    cache, first = run.prompt(run.programs.new_cache())
    for array in jax.tree.leaves(first):
        parts = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(parts) == 2
        np.testing.assert_array_equal(*parts)
    kept = [np.asarray(shard.data) for shard in cache.last_token.addressable_shards]
    np.testing.assert_array_equal(*kept)


def test_one_device_needs_no_placement():
    """The same programs, without a mesh, on the first device."""
    model = load_model(GOLDENS / "tiny_ckpt", numerics=FLOAT32)
    programs = Programs(model, build_ops("tp1", FLOAT32, "reference"), SHAPE)
    assert programs.ranks == 1
    cache = programs.new_cache()
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(cache)} == {1}
