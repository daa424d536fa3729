"""Why ``auto`` runs no kernel of an operation for given operands, as the operations decide it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chosen import row_count, takes
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.moe_experts.repack import PackedExperts, misfit
from pallas_kernels.numerics import SERVING, Numerics
from pallas_kernels.quant import Packed

NO_KERNEL = "embedding", "list_attention", "mhc_collapse", "mhc_expand"
STREAMS = "four bfloat16 streams"
ROWS = (
    "latents of 512 of which 64 rotate, index keys of 128, packed rows, bfloat16 weights and"
    " inputs (float32 pairs)"
)


def reason(op: str, numerics: Numerics, arguments: tuple, options: dict[str, Any]) -> str:
    """For a call of an operation of ``Ops``; "" if a kernel should run."""
    if op in NO_KERNEL:
        return "has no kernel"
    if not on_hopper():
        return f"{jax.devices()[0].device_kind} is no sm_90 GPU"
    if numerics != SERVING:
        return f"{numerics.name} numerics are the reference's"
    return _OF[op](numerics, *arguments, **options)


def _rows(op: str, rows: int, outputs: tuple[int, ...] = (), k: int = 0) -> str:
    return "" if takes(op, rows, outputs, k) else f"{rows} rows are not those of chosen.py"


def _linears(numerics: Numerics, x: Any, weights: Any, out_dtype: Any = None) -> str:
    from pallas_kernels.linear.kernel_sm90 import unfit

    if not all(isinstance(w, Packed) for w in weights):
        return "plain weights must be Fp8Blocks"
    outputs = tuple(w.shape[0] for w in weights)
    fault = unfit(x, weights, numerics, out_dtype)
    return fault or _rows("linear", row_count(x), outputs, x.shape[-1])


def _linear(numerics: Numerics, x: Any, weight: Any, out_dtype: Any = None) -> str:
    return _linears(numerics, x, (weight,), out_dtype)


def _gathered(numerics: Numerics, x: Any, weight: Any, outputs: int, out_dtype: Any = None) -> str:
    return _linears(numerics, x, (weight,), out_dtype)


def _normed(numerics: Numerics, x: Any, norm: Any, weights: Any, **_: Any) -> str:
    from pallas_kernels.linear.kernel_sm90 import normed_unfit

    outputs = tuple(w.shape[0] for w in weights)
    fault = normed_unfit(x, norm, weights, numerics)
    return fault or _rows("normed_linear", row_count(x), outputs, x.shape[-1])


def _projection(numerics: Numerics, o: Any, wo_a: Any, wo_b: Any, *, groups: int, **_: Any) -> str:
    from pallas_kernels.output_projection.kernel_sm90 import unfit

    fault = unfit(o, wo_a, groups, numerics)
    outputs, k = wo_a.shape
    return fault or _rows("grouped_projection", row_count(o, 2), (outputs,), k)


def _coefficients(numerics: Numerics, h: Any, *_: Any, **__: Any) -> str:
    fits = h.dtype == jnp.bfloat16 and h.shape[-2] == 4 and h.shape[-2] * h.shape[-1] % 4096 == 0
    return "" if fits else f"{_streams(h)} must be {STREAMS} of 4096 n columns together"


def _pass(numerics: Numerics, h: Any, y: Any, *_: Any, **__: Any) -> str:
    from pallas_kernels.columns import COLUMNS, MAX_WIDTH

    width = h.shape[-1]
    fits = h.dtype == jnp.bfloat16 and h.shape[-2] == 4 and width % COLUMNS == 0
    if fits and width <= MAX_WIDTH:
        return ""
    return f"{_streams(h)} must be {STREAMS} of {COLUMNS} n columns to {MAX_WIDTH}"


def _streams(h: Any) -> str:
    return f"{h.shape[-2]} {h.dtype} streams of {h.shape[-1]} columns"


def _site(numerics: Numerics, h: Any, y: Any, *_: Any, **__: Any) -> str:
    """Where it is not one launch it is two operations, of which any may have its own: one launch
    takes no widths that they do not.
    """
    passes = y is not None and not _pass(numerics, h, y)
    return "" if passes else _coefficients(numerics, h)


def _gate(numerics: Numerics, x: Any, weight: Any, *_: Any, top_k: int, **__: Any) -> str:
    from pallas_kernels.moe_gate.kernel_sm90 import unfit

    return unfit(x, weight, top_k)


def _experts(
    numerics: Numerics, x: Any, ids: Any, w: Any, experts: Any, shared: Any, **_: Any
) -> str:
    if isinstance(experts, PackedExperts):
        return ""
    return misfit(experts, shared) or "weights are not packed"


def _latents(numerics: Numerics, *_: Any, **__: Any) -> str:
    return f"must be {ROWS}"


def _beside(numerics: Numerics, x: Any, norm: Any, weights: Any, *_: Any, **__: Any) -> str:
    return _normed(numerics, x, norm, weights)


def _scores(
    numerics: Numerics, q: Any, weights: Any, pool: Any, table: Any, visible: Any, candidates: Any,
    *, block_size: int,
) -> str:  # fmt: skip
    from pallas_kernels.index_scores.kernel_sm90 import supports

    return supports(q, pool, candidates, block_size, numerics)


def _topk(numerics: Numerics, scores: Any, visible: Any, *, k: int, block_size: int = 1) -> str:
    from pallas_kernels.index_topk.kernel_sm90 import unfit

    fault = f"{scores.shape} {scores.dtype}, {k=}, {block_size=} are beyond the kernel's limits"
    return fault if unfit(scores, k, block_size) else ""


def _attention(pool: int) -> Callable:
    def fault(numerics: Numerics, *arguments: Any, window_size: int, **_: Any) -> str:
        from pallas_kernels.sparse_attention.attend_shape import ROPE
        from pallas_kernels.sparse_attention.kernel_sm90 import supports

        q, cos, window = arguments[0], arguments[1], arguments[3]
        if 2 * cos.shape[-1] != ROPE:
            return f"{2 * cos.shape[-1]} dims rotate, must be {ROPE}"
        return supports(q, window, arguments[pool], window_size, numerics)

    return fault


def _engram_rows(numerics: Numerics, table: Any, ids: Any, **_: Any) -> str:
    from pallas_kernels.engram.kernel_sm90 import rows_unfit

    return rows_unfit(table, numerics.dtype) or _rows("engram_rows", row_count(ids))


def _engram_gate(numerics: Numerics, h: Any, kv: Any, q: Any, k: Any, *_: Any, **__: Any) -> str:
    from pallas_kernels.engram.kernel_sm90 import gate_unfit

    return gate_unfit(h, kv, q, k) or _rows("engram_gate_add", row_count(h, 2))


_OF: dict[str, Callable[..., str]] = {
    "linear": _linear,
    "linears": _linears,
    "normed_linears": _normed,
    "gathered_linear": _gathered,
    "output_projection": _projection,
    "mhc_coefficients": _coefficients,
    "mhc_expand_collapse_norm": _pass,
    "mhc_site": _site,
    "moe_gate": _gate,
    "moe_experts": _experts,
    "store_latents": _latents,
    "store_rows": _latents,
    "linears_beside_rows": _beside,
    "index_scores": _scores,
    "candidate_scores": _scores,
    "index_topk": _topk,
    "top_blocks": _topk,
    "sparse_attention": _attention(7),
    "ring_attention": _attention(8),
    "engram_rows": _engram_rows,
    "engram_gate_add": _engram_gate,
}
