"""Batches are a function of the step; masks are the selections of the product."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from dsv41_jax.errors import UserError
from dsv41_jax.training.data import Batches, Corpus, held_out_batches
from dsv41_jax.training.losses import draft_starts
from dsv41_jax.training.optimiser import Recipe, packed, unpacked
from dsv41_jax.training.rounding import through
from dsv41_jax.training.run import affordable
from dsv41_jax.training.selection import candidate_mask, top_mask
from pallas_kernels.index_topk.ref import index_topk, top_blocks
from pallas_kernels.quant import Fp4Rows
from tests.dsv41_jax.training.support import SMALL

IDS = np.arange(1000, dtype=np.uint16)


def test_an_epoch_takes_every_sequence_once():
    batches = Batches(IDS, rows=10, count=3, seed=1)
    steps = batches.per_epoch // 3
    first = [batches.step(step) for step in range(steps)]
    starts = np.sort(np.concatenate(first)[:, 0])
    assert len(set(starts)) == 3 * steps and set(np.diff(starts)) <= {10, 20, 30}
    assert all((np.diff(batch, axis=1) == 1).all() for batch in first)
    again = Batches(IDS, rows=10, count=3, seed=1)
    assert all((again.step(step) == first[step]).all() for step in (5, 0, steps - 1))
    later = np.concatenate([batches.step(steps + step) for step in range(steps)])[:, 0]
    assert not np.array_equal(later, np.concatenate(first)[:, 0])
    assert (Batches(IDS, rows=10, count=3, seed=2).step(0) != first[0]).any()


def test_too_few_tokens_are_refused(tmp_path):
    with pytest.raises(UserError, match="41 or more"):
        Batches(IDS[:40], rows=10, count=3, seed=0)
    with pytest.raises(UserError, match="held-out"):
        held_out_batches(IDS[:20], rows=10, count=3, limit=4)
    assert len(held_out_batches(IDS, rows=10, count=3, limit=4)) == 4


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"train": IDS}, "not a tokenised corpus"),
        ({"train": IDS.astype(np.int32), "held_out": IDS}, "must be uint16"),
        ({"train": IDS, "held_out": IDS}, "token id 999 must be below"),
    ],
)
def test_foreign_data_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(UserError, match=words):
        Corpus.load(tmp_path / "data.npz", 999)
    (tmp_path / "text").write_text(json.dumps({}))
    with pytest.raises(UserError, match="not a tokenised corpus"):
        Corpus.load(tmp_path / "text", 999)


def test_masks_are_the_products_selections():
    """Random scores with many ties, and rows that see little."""
    scores = np.random.default_rng(0).integers(-3, 4, (2, 40, 40)).astype(np.float32) / 4
    visible = np.broadcast_to(np.arange(40, dtype=np.int32), (2, 40))
    scores = jnp.asarray(np.where(np.arange(40) < visible[..., None], scores, -np.inf))

    def mask(ids, size):
        return (np.asarray(ids)[..., None] == np.arange(size)).any(axis=-2)

    got, picked, kept, blocks = compiling.jit(
        lambda: (
            top_mask(scores, 7) & (scores > -jnp.inf),
            index_topk(scores, visible, k=7),
            candidate_mask(scores, visible, block_size=4, k=3),
            top_blocks(scores, visible, block_size=4, k=3),
        )
    )()
    np.testing.assert_array_equal(got, mask(picked, 40))
    np.testing.assert_array_equal(kept, mask(blocks, 10).repeat(4, axis=-1))


def test_rounding_lets_gradients_through():
    x = jnp.linspace(-3, 3, 64)[None]

    def loss(x, on):
        y = through(x, Fp4Rows, on)
        return jnp.sum(y**2), y

    both = compiling.jit(jax.grad(loss, has_aux=True))
    rounded = compiling.jit(lambda x: Fp4Rows.quantize(x).dequantize())(x)
    assert (np.asarray(rounded) != x).any()
    for on, want in ((True, rounded), (False, x)):
        gradient, got = both(x, jnp.asarray(on))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(gradient, 2 * want)


def test_draft_blocks_stay_inside():
    for step in range(50):
        starts = np.asarray(draft_starts(SMALL, 64, step, seed=3))
        assert starts.min() >= 1 and starts.max() + SMALL.dspark_block_size <= 64
    assert np.diff(starts).tolist() == [16, 16]


def test_parameters_are_packed_and_unpacked():
    rng = np.random.default_rng(0)
    shapes = {"a.w1.weight": (3, 4, 5), "b.weight": (4, 5), "embed.weight": (4, 5), "n": (7,)}
    values = {path: jnp.asarray(rng.standard_normal(shape)) for path, shape in shapes.items()}
    groups = packed(values)
    assert {key: value.shape for key, value in groups.items()} == {"4x5": (4, 4, 5), "adam": (27,)}
    back = unpacked(groups, values)
    assert all(np.array_equal(back[path], value) for path, value in values.items())


def test_a_run_warms_up_falls_and_rounds_last():
    recipe = Recipe(peak=1.0, warm=10, falling=0.5, dense=0.2, rounded=0.1)
    phases = [recipe.at(step, 100) for step in range(100)]
    rates = [phase["rate"] for phase in phases]
    assert rates[0] == 0.1 and rates[9:50] == [1.0] * 41 and rates[99] == pytest.approx(0.02)
    assert [phase["dense"] for phase in phases].index(False) == 20
    assert [phase["rounded"] for phase in phases].index(True) == 90
    assert phases[95]["balance"] == 0 < phases[0]["balance"]
    assert affordable(2.0, 100.0) == 30 + 950
