"""The launches for many rows of the hyper-connections' coefficients on a host machine, against
float64 and themselves.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pallas_kernels.mhc import broad_ptx, coefficients_ptx, kernel_sm90, planes_ptx
from pallas_kernels.mhc.broad_shape import SEGMENTS, SMEM_BYTES, Broad
from pallas_kernels.mhc.split_ptx import Split
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_operations import OPERATIONS
from tests.pallas_kernels.ptx_strict import BUSY, Guarded
from tests.pallas_kernels.test_linear_broad import Ring
from tests.pallas_kernels.test_mhc import EPS, NORM_EPS
from tests.pallas_kernels.test_mhc_kernel import (
    BF16,
    FLOATS,
    coefficients_close,
    keeps_all_bits_of_fn,
    mix_inputs,
    place_outputs,
    read,
    row_address,
    takes_zero_streams_and_extreme_mixes,
)


@pytest.fixture(autouse=True)
def float_operations(monkeypatch):
    for name, function in FLOATS.items():
        monkeypatch.setitem(OPERATIONS, name, function)


class Copies(Ring):
    """``Ring`` with copies of 16 bytes that land some time before they are waited for; ``together``
    threads take turns.
    """

    def __init__(self, *args, together: int, **options):
        super().__init__(*args, **options)
        self.together, self.asked, self.flights = together, defaultdict(list), []

    def step(self, b) -> bool:
        ready = ~b.done & (b.waiting < 0)
        if not ready.any():
            return self.release(b)
        groups = np.flatnonzero(ready.reshape(-1, self.together).any(1))
        if self.steps == 0 or self.warp not in groups:
            self.warp, self.steps = self.rng.choice(groups), int(self.rng.integers(1, 1000))
        self.steps -= 1
        others = np.arange(b.n) // self.together != self.warp
        b.waiting[others & ready] = BUSY
        moved = Cluster.step(self, b)
        b.waiting[b.waiting == BUSY] = -1
        return moved

    def execute(self, b, opcode, args, active) -> None:
        if opcode == "cp.async.cg.shared.global":
            to, source = (self.at(b, arg)[active] for arg in args[:2])
            span = b.shared.index(to, 16)[:, None] + np.arange(16)
            self.memory.index(source, 16)
            b.shared.data[span] = 0xFF  # NaN
            self.asked[self.warp].append((span, source))
        elif opcode.startswith("cp.async.mbarrier.arrive.noinc"):
            at = self.at(b, args[0])[active]
            self.flights.append((b, self.asked.pop(self.warp), self.barriers[b.rank, at[0]], at))
        elif not opcode.startswith("prefetch.global"):
            if opcode.startswith("mbarrier.try_wait") and self.flights and self.rng.random() < 0.5:
                self.arrive(*self.flights.pop(self.rng.integers(len(self.flights))))
            super().execute(b, opcode, args, active)
            if opcode.startswith("mbarrier.try_wait") and not b.read(args[0])[active].all():
                self.steps = 0  # it is another's turn

    def arrive(self, b, copies, barrier, at) -> None:
        for span, source in copies:
            b.shared.data[span] = self.memory.data[source[:, None] + np.arange(16)]
        assert (at == at[0]).all()
        barrier.arrive(len(at), 0)


def run_broad(s: Broad, arrays, seed: int = 1, together: int = 128) -> list[np.ndarray]:
    memory = Guarded(1 << 23)
    h, fn, base, scale = (memory.place(np.asarray(a)) for a in arrays)
    image = memory.place(np.full((s.k // 16, 9, 2, 8, 8), np.nan, BF16))
    sums = memory.place(np.full((s.parts, 25, s.padded), np.nan, np.float32))
    outs = place_outputs(memory, *((s.rows, n, np.float32) for n in (4, 4, 16)))

    launch = partial(run_launch, memory, seed, together)
    for block in range(planes_ptx.blocks(s)):
        at = [fn, base, scale, image, block]
        launch(planes_ptx.program(s), planes_ptx.THREADS, 4, at)
    lines = broad_ptx.program(s)
    for tile in range(s.blocks):
        for part in range(s.parts):
            launch(lines, s.threads, 4 * s.words, [h, image, sums, 0, tile, part])
    finish(s, launch, [sums, base, scale, *map(row_address, outs)])
    return [read(memory, out) for out in outs]


def run_launch(
    memory: Guarded,
    seed: int,
    together: int,
    lines: list[str],
    threads: int,
    shared: int,
    operands: list[int],
) -> None:
    size = {"threads": threads, "shared": shared}
    Copies(lines, memory, operands=lambda _: operands, seed=seed, together=together, **size).run()


def finish(s: Broad, launch: Callable, operands: list[int]) -> None:
    lines, words = coefficients_ptx.program(s), coefficients_ptx.WORDS
    for block in range(-(-s.rows // coefficients_ptx.ROWS)):
        launch(lines, coefficients_ptx.THREADS, 4 * words, [*operands, 0, block])


def run_from_sums(s: Broad, arrays) -> list[np.ndarray]:
    """Only the last launch, of sums whose parts are powers of two of the whole."""
    memory = Guarded(1 << 20)
    h, fn, base, scale = (np.asarray(a) for a in arrays)
    h = h.astype(np.float32)
    whole = np.concatenate([h @ fn.T, (h * h).sum(1, keepdims=True)], 1).T
    sums = np.full((s.parts, 25, s.padded), np.nan, np.float32)
    share = 0.5 ** np.minimum(1 + np.arange(s.parts), s.parts - 1)
    sums[..., : s.rows] = share[:, None, None] * whole
    at = [memory.place(np.asarray(a, np.float32)) for a in (sums, base, scale)]
    outs = place_outputs(memory, *((s.rows, n, np.float32) for n in (4, 4, 16)))
    finish(s, partial(run_launch, memory, 1, 32), [*at, *map(row_address, outs)])
    return [read(memory, out) for out in outs]


def many(rows: int, tiles: int, parts: int, k: int = 4096, chunk: int = 128) -> Broad:
    return Broad(rows, k, tiles, parts, 20, EPS, NORM_EPS, chunk)


def equal_but_for_the_poisoned(s: Broad, arrays, wide, seed: int, together: int) -> None:
    arrays = [arrays[0][: s.rows].copy(), *arrays[1:]]
    arrays[0][3] = np.nan
    others = np.delete(np.arange(s.rows), 3)
    for got, want in zip(run_broad(s, arrays, seed, together), wide, strict=True):
        assert got[others].tobytes() == want[others].tobytes() and np.isnan(got[3]).all()


def test_coefficients_of_many_rows(rng):
    """Against float64, and the same bits whatever the tile, the parts and the other rows, of which
    one is NaN; warpgroups, copies and products in random order.
    """
    arrays = mix_inputs(rng, 70)
    wide = run_broad(many(70, 4, 4), arrays)
    coefficients_close(arrays, wide)
    equal_but_for_the_poisoned(many(7, 1, 16), arrays, wide, 2, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "seed"), [(64, 1), (128, 2), (256, 3)])
def test_coefficients_of_many_rows_with_warps_in_any_order(chunk, seed, rng):
    arrays = mix_inputs(rng, 130)
    wide = run_broad(many(130, 4, 8, chunk=chunk), arrays, seed, 32)
    coefficients_close(arrays, wide)
    equal_but_for_the_poisoned(many(70, 2, 4, chunk=chunk), arrays, wide, seed, 32)


@pytest.mark.slow
def test_coefficients_of_many_rows_and_wider_streams(rng):
    arrays = mix_inputs(rng, 130, 8192)
    coefficients_close(arrays, run_broad(many(130, 1, 8, 8192), arrays))


def test_products_of_many_rows_keep_all_bits_of_fn():
    keeps_all_bits_of_fn(partial(run_broad, many(1, 1, 16)))


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_many_zero_streams_and_extreme_mixes(parts):
    takes_zero_streams_and_extreme_mixes(partial(run_from_sums, many(2, 1, parts)))


def test_every_row_count_has_a_launch():
    for rows in (1, 16, 17, 32, 33, 128, 129, 256, 512, 1024, 2048, 4096, 4097, 32768):
        for k in (4096, 20480):
            s = kernel_sm90.tuned(rows, k, iters=20, eps=EPS, norm_eps=NORM_EPS)
            if isinstance(s, Split):
                assert 4 * s.sum_words <= SMEM_BYTES
                continue
            assert 4 * s.words <= SMEM_BYTES and s.slots >= 2 * s.workers and s.padded >= rows
            assert s.segments * s.chunks * s.parts * s.chunk == k and s.chunks >= 1


def test_many_rows_fill_the_multiprocessors():
    tuned = partial(kernel_sm90.tuned, k=20480, iters=20, eps=EPS, norm_eps=NORM_EPS)
    for rows in (512, 1024, 2048, 4096, 8192):
        s = tuned(rows)
        assert isinstance(s, Broad) and s.blocks * s.parts == 128
        assert rows < 8192 or (s.tiles, s.parts) == (4, 4)


def test_bad_launches_name_the_value():
    for change, text in (
        ({"tiles": 3}, "self.tiles=3 must be one of"),
        ({"parts": SEGMENTS * 2}, "self.parts=32 must be one of"),
        ({"chunk": 512}, "self.chunk=512 must be 64, 128 or 256"),
        ({"iters": 0}, "self.iters=0 must be positive"),
    ):
        with pytest.raises(ValueError, match=text):
            replace(many(200, 1, 4), **change)
