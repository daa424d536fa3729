"""Several GPUs for ``ptx_strict``: each runs its launches one after the other, all at once.

A store to shared memory lands word by word, late and in any order: at the latest when its launch
has ended if the memory is its own, and some time after that if it is a peer's.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.pallas_kernels.ptx_strict import Guarded, Strict

DELAYED = "volatile"  # the kernels' stores to memory that ranks share


@dataclass(frozen=True)
class Launch:
    """lines: a program, operands: of each of its blocks."""

    lines: list[str]
    threads: int
    operands: list[list[int]]
    shared: int = 16


class Node(Strict):
    """A block of a rank's launch."""

    gpu: "Gpu"
    polled: bool = False  # went round its loop once more

    def execute(self, b, opcode, args, active) -> None:
        super().execute(b, opcode, args, active)
        if opcode == "bra":
            self.polled |= bool((b.pc[active] < self.at).any())

    def step(self, b) -> bool:
        self.at = b.pc[~b.done].max(initial=0)
        return super().step(b)

    def move(self, b, memory, name, index, bits, register, on, rest) -> None:
        if name == "st" and DELAYED in rest:
            assert bits == 32
            values = b.read(register)[on].astype(np.uint32)
            for at, value in zip(index.tolist(), values.tolist(), strict=True):
                self.gpu.flying.setdefault(at, deque()).append(value)
            return
        super().move(b, memory, name, index, bits, register, on, rest)


@dataclass
class Gpu:
    """A rank. own: addresses of its shared memory. flying: stores on their way, by address."""

    memory: Guarded
    launches: list[Launch]
    own: range
    rng: np.random.Generator
    blocks: list[Node] = field(default_factory=list)
    flying: dict[int, deque[int]] = field(default_factory=dict)
    ended: int = 0

    @property
    def done(self) -> bool:
        return self.ended == len(self.launches)

    def work(self, clock: int) -> None:
        """Some steps of some block."""
        if self.done:
            return
        if not self.blocks:
            self.begin(self.launches[self.ended])
        waiting = [n for n in self.blocks if not n.blocks[0].done.all()]
        if not waiting:
            self.land(1.0, own_only=True)
            self.blocks, self.ended = [], self.ended + 1
            return
        node = waiting[self.rng.integers(len(waiting))]
        block = node.blocks[0]
        block.special["%globaltimer"] = np.full(block.n, clock, np.uint64)
        node.polled = False
        for _ in range(self.rng.integers(1, 400)):
            if node.polled and self.rng.random() < 0.9:
                break  # let others move
            node.step(block)

    def begin(self, launch: Launch) -> None:
        for operands in launch.operands:
            node = Node(
                launch.lines,
                self.memory,
                seed=int(self.rng.integers(1 << 30)),
                threads=launch.threads,
                shared=launch.shared,
                operands=lambda _, operands=operands: operands,
            )
            node.gpu = self
            self.blocks.append(node)

    def land(self, share: float, *, own_only: bool = False) -> None:
        """Let a share of the stores arrive, those to one address in their order."""
        words = self.memory.data.view(np.uint32)
        chosen = list(self.flying) if own_only else self.some(share)
        for at in chosen:
            queue = self.flying[at]
            while queue and (not own_only or at in self.own):
                words[at // 4] = queue.popleft()
                if not own_only:
                    break
            if not queue:
                del self.flying[at]

    def some(self, share: float) -> list[int]:
        addresses = np.array(list(self.flying), np.int64)
        return addresses[self.rng.random(len(addresses)) < share].tolist()


def run_together(gpus: list[Gpu], rng: np.random.Generator, limit: int = 200_000) -> None:
    """All launches of all ranks; which one works, and how often, changes at random."""
    clock, favourite = 1, 0
    while not all(gpu.done for gpu in gpus):
        limit -= 1
        assert limit > 0, "no end in sight"
        if rng.random() < 0.05:
            favourite = int(rng.integers(len(gpus)))
        gpu = gpus[favourite if rng.random() < 0.7 else int(rng.integers(len(gpus)))]
        gpu.work(clock)
        clock += 1000
        if rng.random() < 0.3:
            gpus[int(rng.integers(len(gpus)))].land(float(rng.choice([0.2, 0.7, 1.0])))
