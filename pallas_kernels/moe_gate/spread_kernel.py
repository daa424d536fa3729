"""The launch for few rows (``spread_ptx``)."""

import re
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.moe_gate import spread_ptx
from pallas_kernels.moe_gate.spread_ptx import BLOCKS, ROWS, THREADS, Spread


def row_flags(rows: int, image: Array | None, live: Array | None) -> Array | None:
    """int32 [R]: 1 of an image, plus 2 live; None if nobody says so."""
    if image is None and live is None:
        return None
    bits = (jnp.zeros(rows, bool) if image is None else image).reshape(rows)
    alive = (jnp.ones(rows, bool) if live is None else live).reshape(rows)
    return bits.astype(jnp.int32) + 2 * alive.astype(jnp.int32)


def moe_gate(
    x: Array,
    weight: Array,
    bias: Array,
    bias_vl: Array | None,
    flags: Array | None,
    *,
    top_k: int,
    scale: float,
) -> tuple[Array, Array, Array]:
    """ids, weights [R * k] and candidates [R] of x [R, D]. ``ValueError`` for more than ``ROWS``
    rows.
    """
    (rows, d), experts = x.shape, weight.shape[0]
    if rows > ROWS:
        raise ValueError(f"{rows=} must be at most {ROWS} for a spread tuning")
    kind = "two" if bias_vl is not None else "one" if bias.ndim == 1 else "rows"
    s = Spread(rows, d, experts, top_k, scale, kind, flags is not None)
    every = {"bias_vl": bias_vl, "flags": flags}
    counter = inline_ptx.counters()
    out = launcher(s)(x, weight, bias.reshape(-1), counter, *(every[name] for name in s.extra))
    return out[0], out[1], out[2]


@lru_cache(maxsize=64)
def launcher(s: Spread) -> Callable:
    """(x [R, D], weight [E, D], flat bias, zeroed counter, then ``s.extra``) -> ids, weights
    [R * k], candidates [R] and logits [R * E].
    """
    names = ["x", "weight", "bias", "counter", *s.extra, "ids", "weights", "passed", "logits"]
    number = {name: f"${i}" for i, name in enumerate([*names, "smem", "block"])} | {"tile": "0"}
    operands = ("smem", "bias", "ids", "weights", "passed", "tile", *s.operands)

    def renumber(line: str) -> str:
        return re.sub(r"\$(\d+)", lambda found: number[operands[int(found[1])]], line)

    lines = [renumber(line) for line in spread_ptx.program(s)]
    body = inline_ptx.block(lines, gmem=len(names), smem=1, scalars=1)

    def moe_gate_few_rows(*refs):
        body(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        moe_gate_few_rows,
        out_type=(
            jax.ShapeDtypeStruct((s.rows * s.top_k,), jnp.int32),
            jax.ShapeDtypeStruct((s.rows * s.top_k,), jnp.float32),
            jax.ShapeDtypeStruct((s.rows,), jnp.int32),
            jax.ShapeDtypeStruct((s.rows * s.experts,), jnp.float32),
        ),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
