"""Cases of ``moe_gate``: backbone and draft routers, random weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.moe_gate.ref import sqrt_softplus

F32 = jnp.float32
ROTATED_BYTES = 75e6  # of inputs taken in turn: more than L2 holds
EXECUTIONS = 24


@dataclass(frozen=True)
class Case:
    rows: int
    experts: int = 384
    top_k: int = 6
    hidden: int = 5120
    scale: float = 1.5

    def __str__(self) -> str:
        return f"rows={self.rows},experts={self.experts},top_k={self.top_k}"


CASES = (
    *(Case(rows) for rows in (1, 8, 16, 32, 128, 512, 8192, 32768)),
    *(Case(rows, experts=128, top_k=3) for rows in (5, 160)),
)
CORNERS = (
    Case(1, 8, 2, 256),
    Case(0, 8, 2, 256),
    Case(37, 8, 8, 64),
    Case(5, 384, 6, 32),
    Case(5, 128, 3, 32),
)


def inputs(case: Case, seed: int) -> tuple[Array, Array, Array]:
    """x bf16 [R, D], weight bf16 [E, D] and bias f32 [E]: logits spread by about 1."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (case.rows, case.hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.experts, case.hidden), F32)
    bias = 0.1 * jax.random.normal(keys[2], (case.experts,), F32)
    return x, (w * case.hidden**-0.5).astype(jnp.bfloat16), bias


def xla_path(
    x: Array, weight: Array, bias: Array, *, top_k: int, scale: float
) -> tuple[Array, Array]:
    """The best plain XLA program found: bf16 products summed in float32."""
    s = sqrt_softplus(jnp.einsum("rd,ed->re", x, weight, preferred_element_type=F32))
    ids = jax.lax.top_k(s + bias, top_k)[1]
    picked = jnp.take_along_axis(s, ids, axis=-1)
    return ids, picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20) * scale


def problem(case: Case, impl: str, seed: int) -> Problem:
    if impl == "pallas":
        from pallas_kernels.moe_gate.kernel_sm90 import moe_gate as run
    else:
        run = xla_path
    run = partial(run, top_k=case.top_k, scale=case.scale)
    once = 2 * case.hidden * (case.rows + case.experts)
    sets = min(EXECUTIONS, max(1, round(ROTATED_BYTES / once)))
    data = tuple(inputs(case, seed + i) for i in range(sets))

    def call(i: int, carry: Array, data: Any) -> Array:
        x, weight, bias = data[i % len(data)]
        # Times zero: each execution waits for the one before it.
        return run(x, weight, bias + 0 * carry[0, 0])[1]

    return Problem(
        call=call,
        carry=jnp.zeros((case.rows, case.top_k), F32),
        data=data,
        nbytes=float(once + case.rows * 8 * case.top_k + 4 * case.experts),
        flops=2.0 * case.rows * case.hidden * case.experts,
        executions=EXECUTIONS,
    )
