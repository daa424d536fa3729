"""The PTX of ``linear`` for many rows on a host machine, against float64 and itself."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from pallas_kernels.linear import arrange_ptx, broad_ptx
from pallas_kernels.linear.broad_shape import (
    CLUSTERED,
    GROUP,
    GROUP_BYTES,
    SMEM_BYTES,
    THREADS,
    Broad,
    tuned,
)
from pallas_kernels.linear.fragment_ptx import ORDER, UNIT
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels import ptx_machine as pm
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_linear_kernel import (
    BF16,
    CANARY,
    close,
    inputs,
    run_cluster,
    weights,
)


@dataclass
class Barrier:
    count: int
    left: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, arrivals: int, nbytes: int) -> None:
        self.left, self.bytes = self.left - arrivals, self.bytes + nbytes
        assert self.left >= 0
        if self.left == self.bytes == 0:
            self.left, self.phase = self.count, 1 - self.phase


class Ring(Strict):
    """``Strict`` with barriers in shared memory, bulk copies and groups of wgmma that land when
    they are waited for.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.open, self.groups = defaultdict(list), defaultdict(list)

    def execute(self, b, opcode, args, active) -> None:
        if opcode.startswith(("setmaxnreg", "bar.warp.sync")):
            return
        if opcode.startswith("mbarrier"):
            self.barrier(b, opcode.split(".")[1:3], args, active)
        elif opcode.startswith("cp.async.bulk.shared"):
            self.copy(b, args, active)
        elif opcode.startswith("wgmma.mma_async"):
            super().execute(b, opcode, args, active)
            self.open[b.rank, self.warp].append(self.flying[b.rank].pop())
        elif opcode.startswith("wgmma.commit_group"):
            self.groups[b.rank, self.warp].append(self.open.pop((b.rank, self.warp)))
        elif opcode.startswith("wgmma.wait_group"):
            groups = self.groups[b.rank, self.warp]
            while len(groups) > int(args[0]):
                for call, descriptor, keep, columns, on in groups.pop(0):
                    self.multiply(b, call, descriptor, keep, columns, on)
        else:
            with np.errstate(divide="ignore"):  # by what idle threads hold
                super().execute(b, opcode, args, active)

    def at(self, b, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return b.read(base).astype(np.int64) + int(offset or 0)

    def barrier(self, b, kind, args, active) -> None:
        if kind[0] == "init":
            count = int(args[1])
            self.barriers[b.rank, self.at(b, args[0])[active][0]] = Barrier(count, count)
            return
        found = [self.barriers[b.rank, at] for at in self.at(b, args[1])[active]]
        if kind[0] == "try_wait":
            parity = b.read(args[2])[active]
            flags = np.zeros(b.n, bool)
            flags[active] = [one.phase != p for one, p in zip(found, parity, strict=True)]
            b.write(args[0], flags, active)
        elif kind[1] == "expect_tx":
            assert active.sum() == 1
            found[0].arrive(1, int(b.read(args[2])[active][0]))
        else:
            for one in found:
                one.arrive(1, 0)

    def copy(self, b, args, active) -> None:
        assert active.sum() == 1
        to, source, bar = (int(self.at(b, args[i])[active][0]) for i in (0, 1, 3))
        size = int(b.read(args[2])[active][0])
        assert size > 0 and to % 128 == 0 and source % 16 == size % 16 == 0
        self.memory.index(np.arange(source, source + size, 16), 16)
        b.shared.data[to : to + size] = self.memory.data[source : source + size]
        self.barriers[b.rank, bar].arrive(0, -size)


def _movmatrix(machine, b, rest, args, active) -> None:
    """Both lanes of a quad's threads are a row of 8; rows become columns."""
    value = b.read(args[1]).astype(np.uint32).reshape(-1, 8, 4)
    halves = value.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
    out = np.ascontiguousarray(halves).view(np.uint32).reshape(-1)
    b.write(args[0], out, active)


@pytest.fixture(autouse=True)
def transpose(monkeypatch):
    monkeypatch.setitem(pm.COLLECTIVE, "movmatrix", _movmatrix)


def image_of(x: np.ndarray, s: Broad) -> np.ndarray:
    padded = np.zeros((s.groups * GROUP, s.units * UNIT), BF16)
    padded[: s.rows, : s.k] = x
    tokens = padded.reshape(s.groups, GROUP, s.units, UNIT)[..., ORDER.reshape(8, 8)]
    return np.ascontiguousarray(tokens.transpose(2, 0, 3, 1, 4))


@pytest.mark.parametrize(("rows", "k", "parts"), [(9, 96, 1), (16, 640, 2), (9, 1696, 2)])
def test_image_is_x_in_the_order_of_the_weights(rows, k, parts, rng, monkeypatch):
    s, memory = Broad(rows, k, (64,), 8), Guarded(1 << 18)
    monkeypatch.setattr(arrange_ptx, "RESIDENT", 2 * s.groups)
    assert arrange_ptx.parts(s) == parts
    x = inputs(rng, rows, k)
    want = image_of(x, s)
    at = [memory.place(x), memory.place(np.full_like(want, CANARY))]
    assert want.nbytes == s.units * s.groups * GROUP_BYTES
    for place in np.ndindex(s.groups, parts):
        pm.Cluster(
            arrange_ptx.program(s),
            memory,
            threads=128,
            shared=4,
            operands=lambda rank, place=place: [*at, *place],
        ).run()
    assert memory.read(at[1], want).tobytes() == want.tobytes()


def run_broad(s: Broad, x: np.ndarray, matrices: list[Fp8Blocks], seed: int) -> list[np.ndarray]:
    memory = Guarded(1 << 21)
    at = [memory.place(image_of(x, s))]
    for w in matrices:
        at += [memory.place(np.asarray(w.codes)), memory.place(np.asarray(w.scales))]
    outs = [np.full((s.rows + 2, n), CANARY, np.float32 if s.wide else BF16) for n in s.outputs]
    places = [memory.place(out) for out in outs]
    at += [place + out.strides[0] for place, out in zip(places, outs, strict=True)]
    for block in range(s.blocks):
        run_cluster(
            Ring(
                broad_ptx.program(s),
                memory,
                threads=THREADS,
                shared=4 * s.words,
                operands=lambda rank, block=block: [*at, 0, block],
                blocks=s.splits,
                seed=seed,
            )
        )
    results = [memory.read(*pair) for pair in zip(places, outs, strict=True)]
    for got in results:
        assert (got[[0, -1]] == CANARY).all()
    return [got[1:-1] for got in results]


class Few(Broad):
    """On a GPU of one multiprocessor, so that a block has several tiles, and with few slots."""

    @property
    def slots(self) -> int:
        return 3

    @property
    def blocks(self) -> int:
        return 1


BROAD = (
    Few(69, 96, (96, 32), 8),
    Few(6, 320, (192,), 8, wide=True),
    Few(130, 64, (64,), 16),
    Broad(9, 256, (96, 128), 8, splits=2),
)


@pytest.mark.parametrize("s", BROAD, ids=str)
def test_many_rows_equal_float64(s, rng):
    x, matrices = inputs(rng, s.rows, s.k), [weights(rng, n, s.k) for n in s.outputs]
    results = run_broad(s, x, matrices, 1)
    for got, w in zip(results, matrices, strict=True):
        close(got, x, w)


def test_tiles_are_walked_once():
    s = Broad(8192, 64, (1280, 512), 24)
    lines = [".reg .b32 tile, wtile, rtile, rank, i, j, e, tid; .reg .b64 o;"]
    lines += ["mov.u32 tid, %tid.x; mad.lo.u32 tile, $1, 512, tid;", *broad_ptx._tile(s)]
    lines += ["mad.lo.u32 i, rtile, 1000, wtile; mul.wide.u32 o, tile, 4; add.s64 o, o, $0;"]
    lines += ["st.global.b32 [o], i;"]
    memory, blank = pm.Memory(1 << 14), np.zeros(512, np.uint32)
    at = memory.place(blank)
    pm.Cluster(lines, memory, threads=512, shared=4, operands=lambda _: [at, 0]).run()
    got = memory.read(at, blank)[: s.tiles]
    want = {1000 * r + w for r in range(s.row_tiles) for w in range(s.weight_tiles)}
    assert len(got) == len(want) and {*got.tolist()} == want


def test_every_size_has_a_launch():
    for rows in (129, 512, 1024, 8192, 32768):
        for k, outputs in ((5120, (1280, 512)), (1280, (32768,)), (288, (5120,)), (32, (32,))):
            s = tuned(rows, k, outputs, False)
            assert 4 * s.words <= SMEM_BYTES and s.slots >= 9
            assert GROUP * s.width * s.pitch <= s.words  # sums fit in the place of the ring
            assert s.splits == 1 or s.tiles * s.splits <= CLUSTERED
    assert tuned(8192, 1280, (32768,), False).width == 24
    assert tuned(512, 5120, (1280, 512), False).splits == 4


def test_bad_launches_name_the_value():
    with pytest.raises(ValueError, match=r"self.width=7 must be one of"):
        Broad(200, 64, (64,), 7)
    with pytest.raises(ValueError, match=r"self.splits=2 must be of .* and divide 5 units"):
        Broad(200, 320, (64,), 8, splits=2)
    with pytest.raises(ValueError, match=r"self.splits=8 of 20 tiles must be at most 132 blocks"):
        Broad(1280, 512, (64,), 8, splits=8)
