"""The arithmetic of ``ptx_machine``: a function of (the opcode's parts, operands) -> bits."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

U32, U64, F32 = np.uint32, np.uint64, np.float32


def _signed(x: np.ndarray) -> np.ndarray:
    return x.astype(U32).view(np.int32).astype(np.int64)


def _typed(rest: list[str], x: np.ndarray) -> np.ndarray:
    if x.dtype == bool:
        return x
    kind = rest[-1]
    if kind == "f32":
        return x.astype(U32).view(F32)
    if kind == "s32":
        return _signed(x)
    return (x.astype(U64) & U64((1 << int(kind[1:])) - 1)).astype(np.int64)


def _bits(rest: list[str], x: np.ndarray) -> np.ndarray:
    if rest[-1] == "f32":
        return x.astype(F32).view(U32).astype(U64)
    return x.astype(np.int64).view(U64) if x.dtype != bool else x


def _arith(f: Callable) -> Callable:
    return lambda rest, *x: _bits(rest, f(*(_typed(rest, v) for v in x)))


def _compare(rest, a, b, *more):
    kinds = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    kinds |= {"eq": np.equal, "ne": np.not_equal}
    result = kinds[rest[0]](_typed(rest, a), _typed(rest, b))
    if more:
        result = {"and": np.logical_and, "or": np.logical_or}[rest[1]](result, more[0])
    return result


def _shift(direction: int) -> Callable:
    def shift(rest, a, n):
        n = n.astype(np.int64)
        value = _typed(rest, a)
        moved = value << np.minimum(n, 32) if direction > 0 else value >> np.minimum(n, 40)
        return moved.view(U64)

    return shift


def _multiply(rest, a, b, c=None):
    if "bf16x2" in rest:
        return pairs(a, b, np.multiply)
    if rest[-1] == "f32":
        out = _typed(rest, a) * _typed(rest, b)
        return _bits(rest, out if c is None else out + _typed(rest, c))
    out = _typed(rest, a) * _typed(rest, b)
    if c is not None:
        out = out + (c.astype(U64).view(np.int64) if "wide" in rest else _typed(rest, c))
    return out.view(U64)


def halves(x: np.ndarray) -> np.ndarray:
    """The two bf16 lanes of 32-bit words, as float32 [n, 2]."""
    x = x.astype(U32)
    return np.stack([x << 16, x & 0xFFFF0000], 1).astype(U32).view(F32)


def f16_halves(x: np.ndarray) -> np.ndarray:
    return x.astype(U32).view(np.float16).reshape(-1, 2).astype(F32)


def packed(values: np.ndarray) -> np.ndarray:
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(U64)
    return bits[:, 0] | bits[:, 1] << U64(16)


def pairs(a: np.ndarray, b: np.ndarray, f: Callable) -> np.ndarray:
    return packed(f(halves(a), halves(b)))


def _convert(rest, *x):
    if rest[-2:] == ["f16x2", "e4m3x2"]:
        codes = x[0].astype(np.uint16).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
        return codes.astype(np.float16).view(U32).astype(U64)
    if "bf16x2" in rest:
        high, low = (v.astype(U32).view(F32) for v in x)
        both = np.stack([low, high], 1)
        return packed(
            np.where(both > 0, both, np.where(np.isnan(both), both, 0)) if "relu" in rest else both
        )
    if "f16x2" in rest or "e4m3x2" in rest:
        high, low = (v.astype(U32).view(F32) for v in x)
        if "f16x2" in rest:
            low, high = (v.astype(np.float16).view(np.uint16).astype(U64) for v in (low, high))
            return low | high << U64(16)
        assert "satfinite" in rest
        low, high = (e4m3_bits(v) for v in (low, high))
        return low | high << U64(8)
    if rest[-2:] == ["f16", "f32"]:
        return x[0].astype(U32).view(F32).astype(np.float16).view(np.uint16).astype(U64)
    if rest[-2:] == ["bf16", "f32"]:
        value = x[0].astype(U32).view(F32)
        return value.astype(ml_dtypes.bfloat16).view(np.uint16).astype(U64)
    return x[0].astype(U64)


def e4m3_bits(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(U64)


def _extreme(f: Callable) -> Callable:
    def extreme(rest, a, b):
        if rest[-1] != "u16x2":
            return _arith(f)(rest, a, b)
        low, high = (_arith(f)(["u16"], a >> U64(n), b >> U64(n)) for n in (0, 16))
        return low | high << U64(16)

    return extreme


def _fused(rest, a, b, c):
    x, y, z = (_typed(rest, v).astype(np.float64) for v in (a, b, c))
    return _bits(rest, x * y + z)


def _quotient(rest, a, b):
    return _arith(np.true_divide if rest[-1] == "f32" else np.floor_divide)(rest, a, b)


def _inverse(a):
    with np.errstate(divide="ignore"):
        return F32(1) / a


def _permute(rest, a, b, sel):
    data = (a.astype(U64) & U64(0xFFFFFFFF)) | (b.astype(U64) << U64(32))
    out = np.zeros(len(a), U64)
    for i in range(4):
        pick = (sel.astype(U64) >> U64(4 * i)) & U64(7)
        out |= ((data >> (pick * U64(8))) & U64(0xFF)) << U64(8 * i)
    return out


def _lop3(rest, a, b, c, table):
    a, b, c = (v.astype(U64) & U64(0xFFFFFFFF) for v in (a, b, c))
    out, ones, table = np.zeros(len(a), U64), U64(0xFFFFFFFF), int(table[0])
    for i in range(8):
        if table >> i & 1:
            x, y, z = a if i & 4 else ~a, b if i & 2 else ~b, c if i & 1 else ~c
            out |= x & y & z
    return out & ones


def _extract(rest, a, start, length):
    return (a.astype(U64) >> start.astype(U64)) & ((U64(1) << length.astype(U64)) - U64(1))


def _highest(rest, a):
    a = a.astype(U64) & U64(0xFFFFFFFF)
    return np.array([int(v).bit_length() - 1 for v in a], np.int64).view(U64)


OPERATIONS: dict[str, Callable] = {
    "mov": lambda rest, a: a,
    "cvt": _convert,
    "add": _arith(lambda a, b: a + b),
    "sub": _arith(lambda a, b: a - b),
    "min": _extreme(np.fmin),
    "max": _extreme(np.fmax),
    "mul": _multiply,
    "mad": _multiply,
    "div": _quotient,
    "fma": _fused,
    "abs": _arith(np.abs),
    "sqrt": _arith(np.sqrt),
    "rcp": _arith(_inverse),
    "ex2": _arith(np.exp2),
    "and": lambda rest, a, b: a & b if a.dtype == bool else _arith(np.bitwise_and)(rest, a, b),
    "or": lambda rest, a, b: a | b if a.dtype == bool else _arith(np.bitwise_or)(rest, a, b),
    "xor": _arith(np.bitwise_xor),
    "not": lambda rest, a: ~a if a.dtype == bool else ~a.astype(U64),
    "neg": _arith(lambda a: -a),
    "shl": _shift(1),
    "shr": _shift(-1),
    "setp": _compare,
    "selp": lambda rest, a, b, p: np.where(p, a.astype(U64), b.astype(U64)),
    "popc": lambda rest, a: np.array([int(v & U64(0xFFFFFFFF)).bit_count() for v in a], U64),
    "bfind": _highest,
    "bfe": _extract,
    "prmt": _permute,
    "lop3": _lop3,
}
