"""A warp of the gate kernel's PTX on the host: ``select_ptx`` runs as written, 32 lanes a NumPy
array, approximate instructions exactly or with an error of the caller's choice.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pallas_kernels.moe_gate import select_ptx

U32, I32, F32 = np.uint32, np.int32, np.float32
LANES = np.arange(32, dtype=U32)
APPROXIMATE = {"ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt}
COMPARE = {
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "lt": np.less,
}


@dataclass
class Warp:
    """One warp: registers hold 32 lanes of words (bool for predicates)."""

    shared: np.ndarray  # words of the block, or [splits, words] of its cluster
    memory: list[np.ndarray]  # operands $1.. : flat word arrays at address (i + 1) << 32
    constants: dict[str, np.ndarray]
    noise: Callable[[np.ndarray], np.ndarray] = lambda x: x
    registers: dict[str, np.ndarray] = field(default_factory=dict)

    def value(self, name: str, dtype: type = U32) -> np.ndarray:
        if name in self.registers:
            words = self.registers[name]
        elif name in self.constants:
            words = self.constants[name]
        elif name.startswith("0f"):
            words = np.full(32, int(name[2:], 16), U32)
        else:
            words = np.full(32, int(name, 0) & 0xFFFFFFFF, U32)
        return words if words.dtype in (bool, np.int64) else words.view(dtype)

    def write(self, name: str, value: np.ndarray, lanes: np.ndarray) -> None:
        value = np.asarray(value)
        if value.dtype in (F32, I32):
            value = value.view(U32)
        old = self.registers.get(name)
        old = np.zeros(32, value.dtype) if old is None else old
        self.registers[name] = np.where(lanes, value, old)


def _float(w: Warp, op: list[str], args: list[str]) -> np.ndarray:
    a, *rest = (w.value(x, F32) for x in args)
    name = op[0]
    if "approx" in op:
        return w.noise(APPROXIMATE[name](a.astype(np.float64))).astype(F32)
    if name == "fma":
        return (a.astype(np.float64) * rest[0] + rest[1]).astype(F32)
    functions = {
        "add": np.add,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "neg": np.negative,
        "abs": np.abs,
        "sqrt": np.sqrt,
    }
    return functions[name](a, *rest).astype(F32)


def _integer(w: Warp, op: list[str], args: list[str]) -> np.ndarray:
    a, *rest = (w.value(x) for x in args)
    name = op[0]
    match name, op[1]:
        case "mul", "wide":
            return a.astype(np.int64) * rest[0].astype(np.int64)
        case "mad" | "mul", _:
            return a * rest[0] + (rest[1] if name == "mad" else U32(0))
        case "shr", "s32":
            return a.view(I32) >> rest[0].view(I32)
        case "bfe", _:
            return (a >> rest[0]) & ((U32(1) << rest[1]) - U32(1))
        case "popc", _:
            return np.bitwise_count(a).astype(U32)
        case "brev", _:
            return np.array([int(f"{x:032b}"[::-1], 2) for x in a], U32)
        case "clz", _:
            return np.array([32 - int(x).bit_length() for x in a], U32)
        case "not", _:
            return ~a
    functions = {
        "add": np.add,
        "sub": np.subtract,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shl": np.left_shift,
        "shr": np.right_shift,
        "max": np.maximum,
        "min": np.minimum,
    }
    return functions[name](a, *rest)


def _address(w: Warp, text: str) -> np.ndarray:
    base, _, offset = text.strip("[]").partition("+")
    return w.value(base).astype(np.int64) + int(offset or 0)


def _memory(w: Warp, op: list[str], args: list[str], lanes: np.ndarray) -> None:
    load = op[0] == "ld"
    names, text = (args[:-1], args[-1]) if load else (args[1:], args[0])
    if not lanes.any():
        return
    at = np.where(lanes, _address(w, text), 0)
    target = w.memory[int(at[lanes][0] >> 32) - 1] if op[1] == "global" else w.shared.reshape(-1)
    at = (at & 0xFFFFFFFF) // 4
    for j, name in enumerate(names):
        if load:
            w.write(name, target[np.where(lanes, at + j, 0)], lanes)
        else:
            target[at[lanes] + j] = w.value(name)[lanes]


def _step(w: Warp, op: list[str], args: list[str], lanes: np.ndarray) -> None:
    target, *args_in = args
    match op[0]:
        case "ld" | "st":
            _memory(w, op, args, lanes)
            return
        case "mov":
            out = w.value(args_in[0])
        case "setp":
            kind = {"f32": F32, "s32": I32}.get(op[-1], U32)
            a, b = (w.value(x, kind) for x in args_in[:2])
            out = COMPARE[op[1]](a, b)
            if op[2] == "and":
                out = out & w.value(args_in[2])
            if op[2] == "or":
                out = out | w.value(args_in[2])
        case "selp":
            out = np.where(w.value(args_in[2]), w.value(args_in[0]), w.value(args_in[1]))
        case "redux":
            reduce = {"max": np.max, "min": np.min}[op[2]]
            out = np.full(32, reduce(w.value(args_in[0])), U32)
        case "vote":
            bits = w.value(args_in[0]).astype(np.uint64) << LANES.astype(np.uint64)
            out = np.full(32, bits.sum(), U32)
        case "shfl":
            out = w.value(args_in[0])[w.value(args_in[1]) & 31]
        case "mapa":  # a block's words follow those of the block before it
            block = U32(4 * w.shared.shape[-1])
            out = w.value(args_in[0]) % block + w.value(args_in[1]) * block
        case _ if op[-1] == "s64":
            out = w.value(args_in[0]) + w.value(args_in[1])
        case _ if op[-1] == "f32":
            out = _float(w, op, args_in)
        case _:
            out = _integer(w, op, args_in)
    w.write(target, out, lanes)


def steps(w: Warp, lines: list[str]) -> Iterator[None]:
    """Run PTX in which only whole warps branch; stops at each barrier."""
    text = re.sub(
        r"([A-Z]+):", r"label \1;", re.sub(r"{ \.reg|\}$", ".reg", "\n".join(lines), flags=re.M)
    )
    code = [one.strip() for one in text.split(";") if one.strip()]
    labels = {one.split()[1]: at for at, one in enumerate(code) if one.startswith("label")}
    at = 0
    while at < len(code):
        one, lanes, at = code[at], np.full(32, True), at + 1
        if one.startswith((".", "label")):
            continue
        if one.startswith("@"):
            guard, _, one = one.partition(" ")
            lanes = w.value(guard.strip("@!"))
            lanes = ~lanes if "!" in guard else lanes
        name, _, operands = one.partition(" ")
        if name == "bra":
            assert lanes.all() or not lanes.any()
            at = labels[operands] if lanes.all() else at
        elif name.startswith(("bar.sync", "barrier")):
            yield
        elif name.startswith("bar.warp"):
            continue
        else:
            args = [x.strip() for x in re.sub(r"[{}]", "", operands).split(",")]
            with np.errstate(all="ignore"):
                _step(w, name.split("."), args, lanes)


def run(warps: list[Warp], lines: list[str]) -> None:
    """The warps of a block, from barrier to barrier."""
    running = [steps(w, lines) for w in warps]
    while running:
        more = [next(one, True) is None for one in running]
        assert all(more) or not any(more)
        running = running if all(more) else []


def banked(logits: np.ndarray) -> np.ndarray:
    """[rows, E] in the order in which the kernel keeps them in shared memory."""
    rows, experts = np.indices(logits.shape)
    out = np.empty_like(logits)
    out[rows, experts ^ ((rows >> 1 & 3) << 3)] = logits
    return out


def published(accumulators: np.ndarray) -> np.ndarray:
    """What ``publish`` leaves of the accumulators of E experts x rows: [rows, E], banked."""
    experts, tile = accumulators.shape
    shared, warps = np.zeros(tile * experts, U32), []
    order = np.indices((2, tile // 8, 2, 2)).reshape(4, -1).T
    for warp in range(experts // 32):
        first = 128 * (warp // 4) + 16 * (warp % 4) + LANES // 4
        constants = {"%tid.x": LANES + U32(32 * warp), f"${tile}": np.zeros(32, U32)}
        for index, (m, j, h, i) in enumerate(order):
            words = accumulators[first + 64 * m + 8 * h, 8 * j + 2 * (LANES % 4) + i]
            constants[f"${index}"] = words.astype(F32).view(U32)
        warps.append(Warp(shared, [], constants))
    run(warps, select_ptx.publish(tile, experts))
    return shared.view(F32).reshape(tile, experts)


@dataclass
class Result:
    """Flat outputs of a launch; what no block writes stays -1 and NaN."""

    ids: np.ndarray
    weights: np.ndarray
    passed: np.ndarray

    @classmethod
    def unwritten(cls, c: select_ptx.Select) -> "Result":
        picks = c.rows * c.top_k
        return cls(np.full(picks, -1, I32), np.full(picks, np.nan, F32), np.full(c.rows, -1, I32))


def select_block(
    c: select_ptx.Select,
    partials: np.ndarray,
    bias: np.ndarray,
    out: Result,
    *,
    tile: int = 0,
    split: int = 0,
    noise: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    flagged: tuple[np.ndarray, ...] = (),
) -> None:
    """One block of a cluster; partials f32 [splits, tile rows, E], banked; ``flagged`` are the bias
    of images and the rows' flags.
    """
    memory = [np.ascontiguousarray(bias, F32).reshape(-1), out.ids, out.weights, out.passed]
    memory += [np.zeros(1, F32), *flagged]
    shared = partials.reshape(c.splits, -1).view(U32).copy()
    warps = []
    for warp in range(c.warps):
        constants = {f"${i}": np.full(32, i << 32, np.int64) for i in (1, 2, 3, 4, 6, 7)}
        constants |= {
            "$0": np.full(32, 4 * split * shared.shape[-1], U32),
            "$5": np.full(32, tile, U32),
            "%tid.x": LANES + U32(32 * warp),
            "%lanemask_lt": (U32(1) << LANES) - U32(1),
            "%cluster_ctarank": np.full(32, split, U32),
        }
        warps.append(Warp(shared, [m.view(U32) for m in memory], constants, noise))
    run(warps, select_ptx.select(c))


def moe_gate(
    c: select_ptx.Select,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    noise: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> Result:
    """A whole launch; x f32 [R, D], weight f32 [E, D], bias f32 [E] or [R, E]."""
    out = Result.unwritten(c)
    tiles = -(-c.rows // c.tile)
    padded = np.zeros((tiles * c.tile, x.shape[1]), F32)
    padded[: c.rows] = x
    parts = np.split(padded, c.splits, axis=1), np.split(weight, c.splits, axis=1)
    for tile in range(tiles):
        rows = slice(tile * c.tile, (tile + 1) * c.tile)
        partials = np.stack([published(w @ p[rows].T) for p, w in zip(*parts, strict=True)])
        for split in range(c.splits):
            select_block(c, partials, bias, out, tile=tile, split=split, noise=noise)
    return out
