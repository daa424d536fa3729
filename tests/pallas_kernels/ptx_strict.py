"""``ptx_machine`` without its kindness: warps take turns at random, as do the blocks of a cluster,
registers and shared memory begin with garbage, a global access has to lie within one array, and
wgmma reads its operands as late as it may.
"""

import numpy as np

from tests.pallas_kernels import ptx_machine as pm

BUSY = 999  # what the machine sees of the warps whose turn it is not


class Guarded(pm.Memory):
    """Global memory of which only placed arrays may be touched."""

    def __init__(self, size: int):
        super().__init__(size)
        self.owner = np.zeros(size, np.int32)
        self.arrays = 0

    def place(self, array: np.ndarray) -> int:
        at = super().place(array)
        self.arrays += 1
        self.owner[at : at + array.nbytes] = self.arrays
        return at

    def index(self, address: np.ndarray, width: int) -> np.ndarray:
        index = super().index(address, width)
        first, last = self.owner[index], self.owner[index + width - 1]
        assert ((first == last) & (first > 0)).all(), "access outside the arrays"
        return index


class Strict(pm.Cluster):
    """A cluster whose warps and blocks run for random numbers of steps at a time."""

    def __init__(self, lines, memory, *, seed: int, **options):
        super().__init__(lines, memory, **options)
        self.rng = np.random.default_rng(seed)
        self.warp, self.steps = 0, 0
        self.flying: list[list] = [[] for _ in self.blocks]
        for b in self.blocks:
            b.shared.data[:] = self.rng.integers(0, 256, b.shared.data.size)
            for register in b.registers.values():
                register[:] = self.rng.integers(0, 1 << min(31, 8 * register.itemsize), b.n)

    def run(self, limit: int = 20_000_000) -> None:
        idle = 0
        while not all(b.done.all() for b in self.blocks):
            b = self.blocks[self.rng.integers(len(self.blocks))]
            self.steps = 0
            moved = [self.step(b) for _ in range(self.rng.integers(1, 3000))]
            limit, idle = limit - sum(moved), 0 if any(moved) else idle + 1
            assert limit > 0 and idle < 1000 * len(self.blocks), "no end in sight"

    def step(self, b) -> bool:
        ready = ~b.done & (b.waiting < 0)
        if not ready.any():
            return self.release(b)
        warps = np.flatnonzero(ready.reshape(-1, 32).any(1))
        if self.steps == 0 or self.warp not in warps:
            self.warp, self.steps = self.rng.choice(warps), int(self.rng.integers(1, 1000))
        self.steps -= 1
        mine = np.arange(b.n) // 32 == self.warp
        b.waiting[~mine & ready] = BUSY
        moved = super().step(b)
        b.waiting[b.waiting == BUSY] = -1
        return moved

    def execute(self, b, opcode, args, active) -> None:
        if opcode.startswith("cp.async.bulk.prefetch"):
            self.prefetch(b, args, active)
        elif opcode.startswith("wgmma.mma_async"):
            descriptor, keep = b.read(args[2]).copy(), b.read(args[3]).copy()
            columns = int(opcode.split(".")[4].removeprefix("m64n").removesuffix("k16"))
            self.flying[b.rank].append((args, descriptor, keep, columns, active.copy()))
        elif opcode.startswith("wgmma.wait_group"):
            assert args == ["0"]
            self.land(b, active)
        else:
            super().execute(b, opcode, args, active)

    def prefetch(self, b, args, active) -> None:
        at, size = b.read(args[0].strip("[]"))[active], b.read(args[1])[active]
        assert (at % 16 == 0).all() and (size % 16 == 0).all()
        for start, length in zip(at.astype(np.int64), size.astype(np.int64), strict=True):
            if length:
                self.memory.index(np.arange(start, start + length, 16), 16)

    def land(self, b, active) -> None:
        waiting = []
        for args, descriptor, keep, columns, on in self.flying[b.rank]:
            now = on & active
            if now.any():
                self.multiply(b, args, descriptor, keep, columns, now)
            if (on & ~active).any():
                waiting.append((args, descriptor, keep, columns, on & ~active))
        self.flying[b.rank] = waiting

    def multiply(self, b, args, descriptor, keep, columns, active) -> None:
        left = pm._fragment(b, pm._names(args[1]))
        product = np.zeros((b.n // 32, 16, columns), np.float32)
        k, n = np.ogrid[:16, :columns]
        with np.errstate(invalid="ignore", over="ignore"):
            for warp in np.flatnonzero(active[::32]):
                fields = (int(descriptor[32 * warp]) >> shift & 0x3FFF for shift in (0, 16, 32))
                start, leading, stride = (16 * field for field in fields)
                at = start + k // 8 * leading + n // 8 * stride + n % 8 * 16 + k % 8 * 2
                bits = b.shared.data.view(np.uint16)[at // 2].astype(np.uint32) << 16
                product[warp] = left[warp] @ bits.view(np.float32)
        pm._accumulate(b, pm._names(args[0]), product, keep, active)
