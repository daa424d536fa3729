"""A host machine for the PTX of this project's kernels: all threads of a block in lock-step.

At each step the threads at the lowest program counter execute, so that divergent ones meet again.
Blocks of a cluster take turns at its barriers. Loads and stores are checked for bounds and
alignment. Only the instructions that the kernels use are known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.pallas_kernels.ptx_operations import F32, OPERATIONS, U32, U64, f16_halves, halves

IGNORED = ("fence", "cp.async.bulk.prefetch", "wgmma.fence", "wgmma.commit", "wgmma.wait")
WINDOW = 24  # an address of another block of the cluster: its rank + 1 from this bit on


@dataclass
class Program:
    """Instructions (guard, opcode, operands), labels by name, registers by name."""

    code: list[tuple[tuple[str, bool] | None, str, list[str]]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, type] = field(default_factory=dict)


def parse(lines: list[str]) -> Program:
    program = Program()
    for statement in ";".join(lines).split(";"):
        text = statement.strip()
        while found := re.match(r"([A-Z][A-Z0-9_]*):\s*", text):
            program.labels[found[1]] = len(program.code)
            text = text[found.end() :]
        if not text:
            continue
        if text.startswith(".reg"):
            _declare(program, *text.split(None, 2)[1:])
            continue
        guard = None
        if found := re.match(r"@(!?)(\w+)\s+", text):
            guard, text = (found[2], not found[1]), text[found.end() :]
        opcode, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        program.code.append((guard, opcode, operands))
    return program


def _declare(program: Program, kind: str, names: str) -> None:
    dtype = {".b32": U32, ".f32": U32, ".b64": U64, ".pred": bool, ".b16": np.uint16}[kind]
    for name in re.findall(r"[^,\s]+", names):
        found = re.fullmatch(r"(\w+)<(\d+)>", name)
        for one in [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name]:
            assert one not in program.registers, f"register {one} is declared twice"
            program.registers[one] = dtype


class Memory:
    """Bytes with checked access; global arrays lie at multiples of 256 from 256 on."""

    def __init__(self, size: int):
        self.data, self.top = np.zeros(size, np.uint8), 256

    def place(self, array: np.ndarray) -> int:
        raw, at = np.frombuffer(array.tobytes(), np.uint8), self.top
        self.data[at : at + raw.size] = raw
        self.top = -(-(at + raw.size) // 256) * 256 + 256
        assert self.top <= self.data.size
        return at

    def read(self, at: int, like: np.ndarray) -> np.ndarray:
        return self.data[at : at + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def index(self, address: np.ndarray, width: int) -> np.ndarray:
        address = address.astype(np.int64)
        assert (address % width == 0).all(), f"misaligned access: {address[address % width != 0]}"
        assert ((address >= 0) & (address + width <= self.data.size)).all(), address
        return address


class Block:
    """One block: ``threads`` threads, their registers and shared memory."""

    def __init__(self, program: Program, threads: int, operands: list, shared: int, rank: int):
        self.program, self.n, self.rank = program, threads, rank
        self.shared = Memory(shared)
        self.pc = np.zeros(threads, np.int64)
        self.done = np.zeros(threads, bool)
        self.waiting = np.full(threads, -1)  # the barrier that a thread waits at
        self.registers = {k: np.zeros(threads, t) for k, t in program.registers.items()}
        self.operands = operands
        self.special = {"%tid.x": np.arange(threads, dtype=U32)}
        self.cluster_arrivals = np.zeros(threads, int)

    def read(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        if name in self.special:
            return self.special[name]
        if name.startswith("$"):
            return np.full(self.n, self.operands[int(name[1:])], U64)
        if name.startswith("0f"):
            return np.full(self.n, int(name[2:], 16), U32)
        return np.full(self.n, int(name, 0) & 0xFFFFFFFFFFFFFFFF, U64)

    def write(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        register = self.registers[name]
        if register.dtype == bool:
            register[active] = value[active]
        else:
            mask = (1 << 8 * register.itemsize) - 1
            register[active] = (value[active].astype(U64) & U64(mask)).astype(register.dtype)


class Cluster:
    """Blocks that share a cluster, with the device's memory."""

    def __init__(
        self,
        lines: list[str],
        memory: Memory,
        *,
        threads: int,
        shared: int,
        operands: Callable[[int], list],
        blocks: int = 1,
    ):
        self.program, self.memory = parse(lines), memory
        self.blocks = [Block(self.program, threads, operands(r), shared, r) for r in range(blocks)]
        self.phase = [0] * blocks

    def run(self, limit: int = 2_000_000) -> None:
        while not all(b.done.all() for b in self.blocks):
            moved = False
            for block in self.blocks:
                while self.step(block):
                    moved = True
                    limit -= 1
                    assert limit > 0, "the program does not end"
            assert moved, "deadlock"

    def cluster_open(self, block: Block) -> bool:
        return all(b.cluster_arrivals.min() > self.phase[block.rank] for b in self.blocks)

    def step(self, b: Block) -> bool:
        ready = ~b.done & (b.waiting < 0)
        if not ready.any():
            return self.release(b)
        pc = b.pc[ready].min()
        active = ready & (b.pc == pc)
        if pc == len(self.program.code):
            b.done |= active
            return True
        guard, opcode, args = self.program.code[pc]
        taken = active
        if guard is not None:
            taken = active & (b.read(guard[0]) == guard[1])
        b.pc[active] += 1
        if taken.any():
            self.execute(b, opcode, args, taken)
        return True

    def release(self, b: Block) -> bool:
        if b.done.all():
            return False
        held = ~b.done
        if (b.waiting[held] == 1000).all():
            if not self.cluster_open(b):
                return False
            self.phase[b.rank] += 1
        elif len(set(b.waiting[held])) > 1 or b.done.any():
            raise AssertionError(f"threads wait at different barriers: {set(b.waiting)}")
        b.waiting[held] = -1
        return True

    def execute(self, b: Block, opcode: str, args: list[str], active: np.ndarray) -> None:
        name, *rest = opcode.split(".")
        if name == "bra":
            b.pc[active] = self.program.labels[args[0]]
        elif opcode == "barrier.sync":
            assert int(args[1]) == b.n, "all threads of the block meet at a barrier"
            b.waiting[active] = int(args[0])
        elif name == "barrier":
            if "arrive" in rest:
                b.cluster_arrivals[active] += 1
            else:
                b.waiting[active] = 1000
        elif name in ("ld", "st", "red", "atom"):
            self.access(b, name, rest, args, active)
        elif opcode.startswith(IGNORED):
            pass
        elif name in COLLECTIVE:
            assert (active.reshape(-1, 32).all(1) == active.reshape(-1, 32).any(1)).all()
            COLLECTIVE[name](self, b, rest, args, active)
        else:
            self.compute(b, name, rest, args, active)

    def target(self, b: Block, rest: list[str], address: np.ndarray, active: np.ndarray):
        """(memory, address) pairs with the threads that they belong to."""
        if "global" in rest:
            yield self.memory, address, active
            return
        assert any(r.startswith("shared") for r in rest), rest
        window = address.astype(np.int64) >> WINDOW
        for w in set(window[active]):
            assert w == 0 or "shared::cluster" in rest
            block = b if w == 0 else self.blocks[w - 1]
            yield block.shared, address & U64((1 << WINDOW) - 1), active & (window == w)

    def access(self, b: Block, name: str, rest: list[str], args: list[str], active: np.ndarray):
        place = args[0] if name in ("st", "red") else args[1]
        base, _, offset = place.strip("[]").partition("+")
        wide = "global" in rest
        address = b.read(base.strip()).astype(U64) + U64(int(offset or "0", 0))
        if not wide:
            address &= U64(0xFFFFFFFF)
        bits = int(rest[-1][1:])
        vector = next((int(r[1:]) for r in rest if r in ("v2", "v4")), 1)
        for memory, at, on in self.target(b, rest, address, active):
            index = memory.index(at[on], bits // 8 * vector)
            if name in ("ld", "st"):
                data = args[1] if name == "st" else args[0]
                for i, one in enumerate(data.strip("{}").split(",")):
                    self.move(b, memory, name, index + i * bits // 8, bits, one.strip(), on, rest)
            else:
                self.atomic(b, memory, name, rest, index, args, on)

    def move(self, b, memory, name, index, bits, register, on, rest) -> None:
        kind = {8: np.uint8, 16: np.uint16, 32: U32, 64: U64}[bits]
        span = index[:, None] + np.arange(bits // 8)
        if name == "st":
            value = b.read(register)[on].astype(kind)
            memory.data[span] = value[:, None].view(np.uint8).reshape(len(index), -1)
            return
        value = np.zeros(b.n, U64)
        value[on] = np.ascontiguousarray(memory.data[span]).view(kind)[:, 0]
        b.write(register, value, on)

    def atomic(self, b, memory, name, rest, index, args, on) -> None:
        words = memory.data.view(U32)
        result = np.zeros(b.n, U64)
        value = b.read(args[-1])[on].astype(U32)
        old = []
        for i, v in zip(index // 4, value, strict=True):
            old.append(words[i])
            words[i] = words[i] | v if "or" in rest else words[i] + v
        result[on] = old
        if name == "atom":
            b.write(args[0], result, on)

    def compute(self, b: Block, name: str, rest: list[str], args: list[str], active) -> None:
        if name == "mapa":
            window = (b.read(args[2]).astype(U64) + U64(1)) << U64(WINDOW)
            b.write(args[0], b.read(args[1]).astype(U64) | window, active)
            return
        if name == "mov" and args[0].startswith("{"):
            value = b.read(args[1])
            bits = 8 * b.registers[args[1]].itemsize // 2
            for i, one in enumerate(args[0].strip("{}").split(",")):
                b.write(one.strip(), value.astype(U64) >> U64(bits * i), active)
            return
        if name == "mov" and args[1].startswith("{"):
            low, high = (b.read(one.strip()).astype(U64) for one in args[1].strip("{}").split(","))
            bits = 8 * b.registers[args[0]].itemsize // 2
            b.write(args[0], low | high << U64(bits), active)
            return
        values = [b.read(a) for a in args[1:]]
        with np.errstate(over="ignore", invalid="ignore"):
            b.write(args[0], OPERATIONS[name](rest, *values), active)


def _vote(machine, b, rest, args, active) -> None:
    flags = (b.read(args[1]).astype(bool) & active).reshape(-1, 32)
    if "ballot" in rest:
        value = (flags.astype(U64) << np.arange(32, dtype=U64)).sum(1)
    else:
        value = flags.any(1)
    b.write(args[0], np.repeat(value, 32), active)


def _shuffle(machine, b, rest, args, active) -> None:
    value, lane = b.read(args[1]), np.arange(b.n) % 32
    amount = b.read(args[2]).astype(np.int64)
    source = {"up": lane - amount, "idx": amount, "bfly": lane ^ amount}[rest[1]]
    source = np.where((source < 0) | (source > 31), lane, source)
    b.write(args[0], value[np.arange(b.n) // 32 * 32 + source], active)


def _redux(machine, b, rest, args, active) -> None:
    value = b.read(args[1]).astype(U64).reshape(-1, 32)
    value = value.max(1) if "max" in rest else value.sum(1)
    b.write(args[0], np.repeat(value, 32), active)


def _elect(machine, b, rest, args, active) -> None:
    """Any thread of a warp may be the one; here the last."""
    value, one = args[0].split("|")
    chosen = np.arange(b.n) % 32 == 31
    b.write(value, np.full(b.n, 31, U64), active)
    b.write(one, chosen, active)


def _names(vector: str) -> list[str]:
    return [one.strip() for one in vector.strip("{}").split(",")]


def _fragment(b: Block, names: list[str], lanes: Callable = halves) -> np.ndarray:
    """A 16 x 16 operand of each warp, [warps, 16, 16]."""
    out = np.zeros((b.n // 32, 16, 16), F32)
    lane = np.arange(32)
    for i, name in enumerate(names):
        row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
        pair = lanes(b.read(name)).reshape(-1, 32, 2)
        out[:, row, column], out[:, row, column + 1] = pair[..., 0], pair[..., 1]
    return out


def _accumulate(
    b: Block, names: list[str], product: np.ndarray, keep, active, start: list[str] | None = None
) -> None:
    """names: 16 x N accumulators of each warp, else ``start``, plus product [warps, 16, N]."""
    lane = np.arange(32)
    olds = [b.read(name).astype(U32).view(F32) for name in start or names]
    for i, name in enumerate(names):
        row, column = lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.where(keep, olds[i], F32(0)) + product[:, row, column].reshape(-1)
        b.write(name, total.astype(F32).view(U32).astype(U64), active)


def _mma(machine, b, rest, args, active) -> None:
    lanes = f16_halves if rest[-2] == "f16" else halves
    left, lane = _fragment(b, _names(args[1]), lanes), np.arange(32)
    right = np.zeros((b.n // 32, 16, 8), F32)
    for i, name in enumerate(_names(args[2])):
        row, column = 2 * (lane % 4) + 8 * i, lane // 4
        pair = lanes(b.read(name)).reshape(-1, 32, 2)
        right[:, row, column], right[:, row + 1, column] = pair[..., 0], pair[..., 1]
    with np.errstate(invalid="ignore", over="ignore"):
        product = left @ right
    _accumulate(b, _names(args[0]), product, True, active, _names(args[3]))


def _wgmma(machine, b, rest, args, active) -> None:
    """m64nNk16 of bf16 with A in registers and B in shared memory without a swizzle."""
    columns = int(rest[3].removeprefix("m64n").removesuffix("k16"))
    left = _fragment(b, _names(args[1]))
    product = np.zeros((b.n // 32, 16, columns), F32)
    k, n = np.ogrid[:16, :columns]
    with np.errstate(invalid="ignore", over="ignore"):
        for group in np.flatnonzero(active[::128]):
            descriptor = int(b.read(args[2])[128 * group])
            start, leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
            at = start + k // 8 * leading + n // 8 * stride + n % 8 * 16 + k % 8 * 2
            bits = b.shared.data.view(np.uint16)[at // 2].astype(U32) << 16
            warps = slice(4 * group, 4 * group + 4)
            product[warps] = left[warps] @ bits.astype(U32).view(F32)
    _accumulate(b, _names(args[0]), product, b.read(args[3]), active)


COLLECTIVE: dict[str, Callable] = {
    "vote": _vote,
    "shfl": _shuffle,
    "redux": _redux,
    "elect": _elect,
    "mma": _mma,
    "wgmma": _wgmma,
}
