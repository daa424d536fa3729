"""Which block of the decode kernel takes which tiles."""

import math
from itertools import chain
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.moe_experts import cases
from pallas_kernels.moe_experts.decode_kernel import Kernel
from pallas_kernels.moe_experts.decode_shape import Shape, Tuning, tuned
from pallas_kernels.moe_experts.decode_share import share


def dealt(blocks: int, earlier: int, rounds: int, n: int) -> list[list[int]]:
    """The tiles below n of each block, in its order."""
    tile, following = share(jnp.arange(blocks), blocks, jnp.int32(earlier), rounds)
    taken: list[list[int]] = [[] for _ in range(blocks)]
    while (tile < n).any():
        for tiles, t in zip(taken, tile.tolist(), strict=True):
            if t < n:
                tiles.append(t)
        tile = following(tile)
    return taken


@pytest.mark.parametrize("blocks", [1, 5, 17])
@pytest.mark.parametrize("weight", [0.3, 1, 1.49, 2.22, 3.5, 8.72])  # of an earlier tile
def test_every_tile_is_taken_once_in_order_and_loads_are_even(blocks, weight):
    rounds = math.ceil(weight)
    for earlier in {0, 1, 2, blocks // 2, blocks - 1, blocks, blocks + 1, 3 * blocks + 2}:
        before = weight * np.array([len(range(b, earlier, blocks)) for b in range(blocks)])
        all_taken = dealt(blocks, earlier, rounds, 9 * blocks + 3)
        for n in {0, 1, 2, blocks - 1, blocks, 3 * blocks + 1, 9 * blocks + 3}:
            taken = [[t for t in tiles if t < n] for tiles in all_taken]
            assert sorted(chain(*taken)) == list(range(n))
            assert all(tiles == sorted(tiles) for tiles in taken)
            alone = (rounds - 1) * (-earlier % blocks)
            loads = before + [len(tiles) for tiles in taken]
            assert np.ptp(loads) <= (1 if n >= alone else weight) + 1e-9, (earlier, n)


def test_without_earlier_tiles_blocks_take_turns():
    for earlier in (0, 10):
        assert dealt(5, earlier, 3, 18) == [list(range(b, 18, 5)) for b in range(5)]


def test_blocks_behind_begin():
    # Blocks 3 and 4 lack a tile that weighs three; then all are even, and 3 and 4 begin again.
    assert dealt(5, 8, 3, 11) == [[6], [7], [8], [0, 2, 4, 9], [1, 3, 5, 10]]


@pytest.mark.parametrize("rows,rounds", [(1, 4), (8, 3)])
def test_rounds_are_no_fewer_down_tiles_than_weigh_as_much(rows, rounds):
    layout = cases.LAYOUTS[0]
    tuning = tuned(rows, layout.local, layout.width)
    s = Shape(rows, 6, layout.local, layout.hidden, layout.width, cases.LIMIT, 132, tuning)
    assert 0 <= s.rounds - s.up.tile_rows / s.down.tile_rows < 1 and s.rounds == rounds


@pytest.mark.parametrize("phases", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("items", [0, 1, 4])
def test_walks_cover_every_split_of_every_tile_once_and_evenly(phases, items, monkeypatch):
    """Blocks as the launch walks them, up before down, K splits of a tile in the list's order."""
    s = Shape(9, 2, 8, 3072, 512, 1.0, 7, Tuning(splits=(2, 1)))
    assert s.rounds > 1 and s.up8.splits > 2
    kernel, refs = Kernel(s, phases, False), SimpleNamespace(plan=jnp.array([items], jnp.int32))
    parts = [
        (p, n)
        for (routed, shared), wanted in zip(kernel.parts, phases, strict=True)
        for p, n in ((shared, s.shared_items), (routed, items))
        if wanted
    ]
    every = [
        (p, item, tile, split)
        for p, n in parts
        for item, tile, split in np.ndindex(n, p.tiles, p.splits)
    ]
    seen, loads = [], []

    def work(p, item, tile, split, carry):
        assert carry == len(walked)
        walked.append((p, int(item), int(tile), int(split)))
        return carry + 1

    for block in range(s.blocks):
        walked: list[tuple] = []
        monkeypatch.setattr(lax, "axis_index", lambda _, block=block: jnp.int32(block))
        with jax.disable_jit():
            kernel.walk(refs, work)
        order = [every.index(at) for at in walked]
        assert order == sorted(order)
        seen += order
        loads.append(sum(p.tile_rows for p, *_ in walked))
    assert sorted(seen) == list(range(len(every)))
    if all(phases):  # a tile of the shared expert is a little lighter
        assert np.ptp(loads) < 1.1 * s.down.tile_rows
