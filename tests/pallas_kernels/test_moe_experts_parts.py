"""Sums of few rows that are left in parts: the plan that says where each of them goes, and the
scatter that follows it, both as PTX on a host machine (``ptx_machine``).
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.addends import Addends
from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts import decode_ptx
from pallas_kernels.moe_experts.decode_plan import TILE
from pallas_kernels.moe_experts.decode_shape import Part, Shape
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded
from tests.pallas_kernels.test_moe_experts_arrange import INVALID, Launch, routing, shape

F32, I32 = np.float32, np.int32
COLUMNS = 64  # of a block of the matrix, the only one here


def joint(rows: int, experts: int = 20) -> Shape:
    splits = (2, 3) if rows < 3 else (1, 1)
    return replace(shape(rows, experts=experts, f=768, splits=splits), joint=True)


def drawn(rng, s: Shape, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids, all of them valid or not; weights are NaN where they are not. A weight of all bits set
    looks like a pair that is none.
    """
    ids, weights = routing(rng, s.rows, s.k, s.experts)
    if kind == "all valid":
        ids = rng.random((s.rows, s.experts)).argsort(-1)[:, : s.k].astype(I32)
    elif kind == "one row":
        ids[np.arange(s.rows) != s.rows // 2] = -1
    elif kind == "one expert":
        ids[:], ids[:, 2] = -1, 3
    elif kind == "nobody":
        ids = np.resize(np.array([*INVALID, s.experts], I32), ids.shape)
    elif kind == "weights of ones":
        weights.view(I32)[:] = -1
    weights[(ids < 0) | (ids >= s.experts)] = np.nan
    return ids, weights


def plan_of(s: Shape, ids: np.ndarray, weights: np.ndarray) -> dp.Plan:
    """What the launch has to write: pairs by expert, then the slots that reach none where their row
    has room.
    """
    valid = (ids >= 0) & (ids < s.experts)
    if s.rows == 1:
        expert, n = np.where(valid, ids, 0)[0], s.k
    else:
        expert = np.unique(ids[valid])
        n = max(len(expert), s.k)
        expert = np.pad(expert, (0, s.items - len(expert)))
    pairs, picked = np.full((s.items, TILE), -1, I32), np.zeros((s.items, TILE), F32)
    for row in range(s.rows):
        for slot in range(s.k):
            if valid[row, slot]:
                item = slot if s.rows == 1 else int(np.flatnonzero(expert == ids[row, slot])[0])
                pairs[item, row] = slot * s.down.splits * s.rows + row
                picked[item, row] = weights[row, slot]
        for slot in np.flatnonzero(~valid[row]):
            item = np.flatnonzero(pairs[:, row] < 0)[0] if s.rows > 1 else slot
            pairs[item, row] = slot * s.down.splits * s.rows + row
    flat = pairs.reshape(-1), picked.reshape(-1)
    return dp.Plan(np.array([n], I32), expert.astype(I32), *flat)


KINDS = ["all valid", "some invalid", "weights of ones", "one row", "one expert", "nobody"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 6, 7])
def test_the_plan_has_a_place_for_each_slot(rows, kind, rng):
    s = joint(rows)
    ids, weights = drawn(rng, s, kind)
    launch = Launch(s, ids, weights, rng)
    launch.plan = plan_of(s, ids, weights)
    places = launch.plan.pairs[launch.plan.pairs >= 0]
    slot, row = np.ogrid[: s.k, : s.rows]
    assert sorted(places) == sorted((slot * s.down.splits * s.rows + row).reshape(-1))
    launch.run(0)
    launch.check_plan()


@pytest.mark.parametrize("experts", [2, 384])
def test_fewer_experts_than_slots_and_as_many_as_there_are(experts, rng):
    s = joint(6, experts)
    ids = rng.random((6, max(6, experts))).argsort(-1)[:, :6].astype(I32)
    weights = rng.random(ids.shape, F32)
    launch = Launch(s, ids, weights, rng)
    launch.plan = plan_of(s, ids, weights)
    launch.run(0)
    launch.check_plan()


def scatter(s: Shape, p: Part, plan: np.ndarray, out: np.ndarray, sums: dict, monkeypatch):
    """``out`` after the scatter of sums[item, split] f32 [T, COLUMNS] of a part's items."""
    monkeypatch.setattr(decode_ptx, "_epilogue", lambda lines, refs, scalars: lines)
    lines = decode_ptx.make_scatter(p.tokens, p.splits, COLUMNS, s.rows)
    at = s.plan.rows if p.shared else s.plan.pairs
    for (item, split), values in sums.items():
        memory = Guarded(1 << 20)
        to, words = memory.place(out), memory.place(plan)
        operands = [16, to, words, at + item * p.tokens, split, 0]
        machine = Cluster(
            lines,
            memory,
            threads=128,
            shared=16 + 4 * values.size,
            operands=lambda _, o=operands: o,
        )
        # Warp w, lane 4 g + q: columns 16 w + g + 8 h of tokens 2 q + i (``decode_ptx``).
        threads = values.reshape(4, 2, 4, 2, 8).transpose(2, 4, 0, 3, 1)
        machine.blocks[0].shared.data[16:] = (
            np.ascontiguousarray(threads).view(np.uint8).reshape(-1)
        )
        machine.run()
        out = memory.read(to, out)
    return out


def parts_of(s: Shape, ids, weights, table, shared, rng, monkeypatch) -> np.ndarray:
    """[parts, R, COLUMNS] that the launches leave of outputs table [E, R, splits, COLUMNS] before
    their weights and shared [R, splits, COLUMNS].
    """
    launch = Launch(s, ids, weights, rng)
    launch.run(0, strict=False)
    plan = launch.outs[0]
    picked = plan[s.plan.weights : s.plan.rows].view(F32).reshape(-1, TILE)
    sums = {}
    for item in range(plan[0]):
        outputs = np.zeros((TILE, *table.shape[2:]), F32)
        outputs[: s.rows] = table[plan[s.plan.expert + item]] * picked[item, : s.rows, None, None]
        sums |= {(item, split): outputs[:, split] for split in range(s.down.splits)}
    out = np.full((s.sums * s.rows, COLUMNS), np.nan, F32)
    out = scatter(s, s.down, plan, out, sums, monkeypatch)
    padded = np.pad(shared, ((0, TILE - s.rows), (0, 0), (0, 0)))
    sums = {(0, split): padded[:, split] for split in range(s.down8.splits)}
    return scatter(s, s.down8, plan, out, sums, monkeypatch).reshape(s.sums, s.rows, COLUMNS)


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, "some invalid"), (2, "some invalid"), (6, "all valid"), (7, "one row")]
)
def test_each_part_is_written_and_adds_up(rows, kind, rng, monkeypatch):
    """float32 sums of P terms: any order is within P - 1 roundings of the exact sum."""
    s = joint(rows)
    ids, weights = drawn(rng, s, kind)
    table = rng.standard_normal((s.experts, rows, s.down.splits, COLUMNS)).astype(F32)
    shared = rng.standard_normal((rows, s.down8.splits, COLUMNS)).astype(F32)
    got = parts_of(s, ids, weights, table, shared, rng, monkeypatch)
    valid = (ids >= 0) & (ids < s.experts)
    row = np.arange(rows)[:, None]
    slots = table[np.where(valid, ids, 0), row] * np.where(valid, weights, 0)[..., None, None]
    first = s.k * s.down.splits
    np.testing.assert_array_equal(got[:first], slots.transpose(1, 2, 0, 3).reshape(first, rows, -1))
    np.testing.assert_array_equal(got[first:], shared.transpose(1, 0, 2))

    order = rng.permutation(rows)
    mixed = ids[order], weights[order], table[:, order], shared[order]
    np.testing.assert_array_equal(parts_of(s, *mixed, rng, monkeypatch), got[:, order])

    y = np.where(valid[..., None, None], slots, np.nan).reshape(-1, s.down.splits, COLUMNS)
    combined = dp.combine(jnp.asarray(y), jnp.asarray(shared), ids, s.experts, False)
    exact, size = got.astype(np.float64).sum(0), np.abs(got).astype(np.float64).sum(0)
    for total in (combined, Addends(jnp.asarray(got)).total(jnp.float32)):
        bound = (s.sums - 1) * 2.0**-24 * size
        assert (np.abs(np.asarray(total, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize(("rows", "k"), [(9, 6), (6, 33)])
def test_more_rows_or_slots_than_a_plan_of_parts_has_room_for_are_refused(rows, k):
    with pytest.raises(ValueError, match=rf"self.rows={rows} and self.k={k} must be at most 8 and"):
        replace(shape(rows, k=k, experts=40), joint=True)
