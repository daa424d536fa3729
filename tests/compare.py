"""Measures of how far two arrays are apart."""

import numpy as np
from jax import Array

from tests.tolerances import (
    ORDER_DIFFERENT_FRACTION,
    ORDER_REL_RMS,
    TRACE_DIFFERENT_FRACTION,
    TRACE_MAX_ABS,
    TRACE_REL_RMS,
)

Values = np.ndarray | Array


def bf16_ulps(a: Values, b: Values) -> np.ndarray:
    """Distance of bfloat16 values (in whatever dtype) in steps of the bfloat16 grid."""

    def order(x: Values) -> np.ndarray:
        bits = np.asarray(x, np.float32).view(np.int32) >> 16
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(order(a) - order(b))


def rel_rms(got: Values, want: Values) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))


def cosines(a: Values, b: Values) -> np.ndarray:
    """Cosine of every row."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def assert_abs(got: Values, want: Values, bound: float, name: str = "") -> None:
    assert got.shape == want.shape, name
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    assert error.max(initial=0) <= bound, f"{name}: max {error.max()} > {bound}"


def assert_traced(got: Values, want: Values, name: str, *, tight: bool) -> None:
    """bfloat16 values computed from a trace's inputs; ``tight`` leaves room for another order of
    summation and nothing else.
    """
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape, name
    rms, differing = rel_rms(got, want), float((got != want).mean())
    report = f"{name}: rel rms {rms:.2e}, {differing:.3%} differ"
    assert rms <= (ORDER_REL_RMS if tight else TRACE_REL_RMS), report
    fraction = ORDER_DIFFERENT_FRACTION if tight else TRACE_DIFFERENT_FRACTION
    assert differing <= max(fraction, 2 / got.size), report
    assert np.abs(got - want).max() <= TRACE_MAX_ABS, report
