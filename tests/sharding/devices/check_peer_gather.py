"""Peer-to-peer gathers in programs of simulated devices against XLA's collectives, and the order of
a program's calls. The gathers themselves are XLA's here; ``test_all_reduce_gather`` runs the
kernel's.
"""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.ops import local_ops
from pallas_kernels.all_reduce import op
from pallas_kernels.numerics import SERVING
from pallas_kernels.quant import Fp8Rows
from sharding.all_reduce import peer_memory
from sharding.collectives import from_first, gather, peer_from_first, peer_gather
from sharding.engram_rows import SpreadRows, spread_embedding, spread_engram_rows
from sharding.layouts import layout
from sharding.mesh import make_mesh
from sharding.peer import PeerMemory
from sharding.place import place
from tests.sharding.devices.check_all_reduce import MODEL, D, peer, run, values

GROUPS = 2  # of four ranks each


@pytest.fixture(scope="module")
def memory():
    mesh = make_mesh(layout("tp4xdep2"))
    return PeerMemory.make(mesh, MODEL, rows=3, width=D, room=1 << 12, kernels="reference")


def same_bits(got, want):
    for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        assert np.asarray(ours).tobytes() == np.asarray(plain).tobytes()


SHAPES = (
    ((2, 3, 5), -1, jnp.float32),  # padded: 20 bytes are no whole 16
    ((3, 2, 8), -2, jnp.bfloat16),
    ((4, 3), 0, jnp.int32),
)


def test_parts_come_together_as_by_xla(memory):
    def step(xs):
        both = [
            [by(x[0], MODEL, axis=axis)[None] for x, (_, axis, _) in zip(xs, SHAPES, strict=True)]
            for by in (peer_gather, gather)
        ]
        return tuple(both)

    normal = 100 * jax.random.normal(jax.random.key(0), (8 * 48,))
    xs = [normal[: 8 * prod(shape)].reshape(8, *shape).astype(dtype) for shape, _, dtype in SHAPES]
    (got, want), errors = run(memory, step, xs)
    same_bits(got, want)
    assert not np.asarray(errors).any()


def test_two_zeros_below_nothing_become_nothing(memory):
    """The word that means "not there yet" is two bf16 -0.0."""
    x = jnp.full((8, 1, 8), -0.0, jnp.bfloat16).at[:, :, 0].set(1)
    got, _ = run(memory, lambda x: peer_gather(x[0], MODEL, axis=1)[None], x)
    bits = np.asarray(got).view(np.uint16)[..., :8]
    assert bits[0, 0].tolist() == [0x3F80, 0x8000, *[0] * 6]


def test_the_first_rank_decides(memory):
    def step(scores):
        mine = scores[0] + jax.lax.axis_index("model") * 1e-3
        mine = mine.at[:, 1].set(jnp.where(jax.lax.axis_index("model") > 0, jnp.nan, -jnp.inf))
        tree = {"scores": mine, "token": jnp.argmax(mine, 1), "odd": mine > 0}
        both = peer_from_first(tree, MODEL), from_first(tree, MODEL)
        return jax.tree.map(lambda leaf: leaf[None], both)

    (got, want), _ = run(memory, step, jax.random.normal(jax.random.key(1), (8, 3, 5)))
    same_bits(got, want)
    assert np.isneginf(np.asarray(got["scores"])[:, :, 1]).all()


def test_rows_of_spread_tables(memory):
    """As many rows as the sum takes, and others; ids of all ranks' parts."""
    spread, ids = SpreadRows((), MODEL), jnp.array([0, 29, 13])
    tables = jax.random.normal(jax.random.key(2), (GROUPS, 32, D), jnp.bfloat16)
    parts = tables.reshape(8, 8, D)

    def step(x):
        look_up = [spread_embedding(spread, peer=p) for p in (True, False)]
        return tuple((each(x[0], ids)[None], each(x[0], ids[:2])[None]) for each in look_up)

    (got, want), _ = run(memory, step, parts)
    same_bits(got, want)
    np.testing.assert_array_equal(got[0][0], tables[0][ids])


def test_engram_rows_are_dequantised_before_they_are_sent(memory):
    look_up = local_ops(SERVING, "reference").engram_rows
    spread, ids = SpreadRows((), MODEL), jnp.array([[[3, 30], [9, 17]]])
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.standard_normal((8, 8, 64)), jnp.float8_e4m3fn)
    scales = jnp.asarray(rng.integers(120, 134, (8, 8, 2)), jnp.uint8)

    def step(planes):
        table = Fp8Rows(planes[0][0], planes[1][0])
        found = [spread_engram_rows(look_up, spread, peer=p)(table, ids) for p in (True, False)]
        return tuple(rows[None] for rows in found)

    (got, want), _ = run(memory, step, (codes, scales))
    same_bits(got, want)
    assert got.shape == (8, 1, 2, 128) and got.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("calls", "kinds"),
    [
        ("", ""),
        ("g", "gg"),  # the next execution would begin in the half that this one ended in
        ("gg", "gg"),
        ("ggg", "gggg"),
        ("sg", "sgss"),
        ("gsssg", "gsssg"),
        ("gsssgg", "gsssggg"),
        ("sssg", "sssg"),
    ],
)
def test_calls_leave_room_for_the_next_execution(calls, kinds, memory, monkeypatch):
    halves, plain = [], op.build_gather("reference")

    def recorded(*arrays, half, **options):
        halves.append(half)
        return plain(*arrays, half=half, **options)

    monkeypatch.setattr("sharding.peer.build_gather", lambda kernels: recorded)
    seen = []

    def step(x):
        for call in calls:
            x = peer(x) if call == "s" else x + peer_gather(x, MODEL, axis=0)[: len(x)]
        return x

    def inside(x, table):
        with memory.calls(table) as made:
            y, errors = step(x), made.finish()
            seen.append("".join(kind[0] for kind in made.kinds))
            return y, errors

    spec = memory.table_spec
    mapped = jax.shard_map(
        inside, mesh=memory.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    jax.eval_shape(mapped, values(3, 8), memory.table)
    assert seen == [kinds]
    assert halves == [i % 2 for i in range(len(halves))] and len(halves) == kinds.count("g")


def test_axes_without_peer_memory_take_xla(memory):
    def step(x):
        across = peer_gather(x[0], ("data",), axis=0)
        return across[None], gather(x[0], ("data",), axis=0)[None]

    (got, want), _ = run(memory, step, jax.random.normal(jax.random.key(4), (8, 2, 4)))
    same_bits(got, want)


def test_what_does_not_fit_is_refused(memory):
    wide = jnp.zeros((8, 3, 512), jnp.float32)
    with pytest.raises(ValueError, match=r"must fit in self.exchange.room=4096 bytes"):
        run(memory, lambda x: peer_gather(x[0], MODEL, axis=1)[None], wide)


def test_room_for_the_widest_of_a_step():
    """Of the release on eight ranks: a part of the logits in float32."""
    cfg = Config.preset("flash")
    division = layout("tp8").divide(cfg)
    placed = replace(place("tp8", Config.preset("tiny")), division=division)
    memory = peer_memory(placed, "reference", 2)
    assert memory.exchange.room == 2 * 4 * cfg.vocab_size // 8
    small = peer_memory(place("tp8", Config.preset("tiny")), "reference", 2)
    assert small.exchange.room == 2 * 4096
