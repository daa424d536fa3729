"""The model's operations as training wants them: whole batches, large products, gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.ops import Ops, local_ops
from dsv41_jax.training.rounding import Quantised, Rounding
from pallas_kernels.mhc.ref import coefficients
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.norm import rms_norm
from pallas_kernels.numerics import Numerics

F32 = jnp.float32
# bfloat16 activations over float32 parameters; what the release rounds is rounded by ``Rounding``.
MIXED = Numerics("mixed", jnp.dtype(jnp.bfloat16), False, False, False)


def training_ops(numerics: Numerics, rounding: Rounding) -> Ops:
    """Reference operations of one device, products in ``numerics.dtype``, every expert on every
    row.
    """
    product = _product(numerics)
    linear = partial(_linear, product, rounding, numerics.dtype)

    def experts(x: Array, ids: Array, weights: Array, *both: ExpertWeights, limit: float) -> Array:
        return moe_experts(product, rounding, x, ids, weights, *both, limit=limit)

    def list_attention(q: Array, kv: Array, valid: Array, sink: Array) -> Array:
        return ops.list_attention(q, rounding.window(kv), valid, sink)

    def output_projection(o: Array, wo_a: Array, wo_b: Array, *, groups: int) -> Array:
        grouped = o.reshape(*o.shape[:-2], groups, -1)
        weight = _values(wo_a).reshape(groups, -1, grouped.shape[-1])
        z = product("...gk,gnk->...gn", grouped, weight)
        return linear(z.reshape(*o.shape[:-2], -1), wo_b)

    ops = local_ops(numerics, "reference")
    return replace(
        ops,
        linear=linear,
        gathered_linear=lambda x, w, *, outputs, out_dtype=None: linear(x, w, out_dtype=out_dtype),
        moe_experts=experts,
        list_attention=list_attention,
        output_projection=output_projection,
        mhc_coefficients=_coefficients,
        mhc_expand=_expand,
        mhc_expand_collapse_norm=partial(_expand_collapse_norm, ops.mhc_collapse),
    )


def with_loads(ops: Ops) -> tuple[Ops, list[Array]]:
    """The operations, and a list to which each call of the experts adds how many rows chose each:
    float32 [E].
    """
    loads: list[Array] = []

    def experts(x: Array, ids: Array, weights: Array, *both: ExpertWeights, limit: float) -> Array:
        count = both[0].w1.shape[0]
        loads.append(jnp.sum(jax.nn.one_hot(ids, count, dtype=F32), axis=(0, 1)))
        return ops.moe_experts(x, ids, weights, *both, limit=limit)

    return replace(ops, moe_experts=experts), loads


def _product(numerics: Numerics) -> Callable:
    precision = "highest" if numerics.dtype == F32 else None

    def product(formula: str, a: Array, b: Array, out_dtype: jnp.dtype | None = None) -> Array:
        a, b = a.astype(numerics.dtype), b.astype(numerics.dtype)
        return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=out_dtype)

    return product


def _values(weight: Array | Quantised) -> Array:
    return weight.values if isinstance(weight, Quantised) else weight


def _linear(
    product: Callable,
    rounding: Rounding,
    dtype: jnp.dtype,
    x: Array,
    weight: Array | Quantised,
    *,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    if isinstance(weight, Quantised):
        x = rounding.linear_input(x)
    return product("...k,nk->...n", x, _values(weight), out_dtype or dtype)


def moe_experts(
    product: Callable,
    rounding: Rounding,
    x: Array,
    ids: Array,
    weights: Array,
    experts: ExpertWeights,
    shared: ExpertWeights,
    *,
    limit: float,
) -> Array:
    """As ``pallas_kernels.moe_experts``; the experts are one product, a routing weight of zero
    silences those not chosen.
    """
    chosen = jax.nn.one_hot(ids, experts.w1.shape[0], dtype=F32)
    routing = jnp.sum(chosen * weights[..., None], axis=1)
    quantised = isinstance(experts.w1, Quantised)
    x = rounding.linear_input(x) if quantised else x

    def inner(w: ExpertWeights, formula: str, routing: Array | None) -> Array:
        gate, up = (product(formula, x, _values(weight)).astype(F32) for weight in (w.w1, w.w3))
        t = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
        t = (t if routing is None else routing[..., None] * t).astype(x.dtype)
        return rounding.linear_input(t) if quantised else t

    routed = inner(experts, "rd,efd->ref", routing)
    own = inner(shared, "rd,fd->rf", None)
    y = product("ref,edf->rd", routed, _values(experts.w2)).astype(F32)
    return (y + product("rf,df->rd", own, _values(shared.w2)).astype(F32)).astype(x.dtype)


def _coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    """As ``pallas_kernels.mhc``, its iterations a loop: unrolled they are most of the program."""
    once = partial(coefficients, h, fn, base, scale, eps=eps, norm_eps=norm_eps)
    pre, post, comb = once(iters=1)

    def again(comb: Array, _: None) -> tuple[Array, None]:
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps), None

    return pre, post, jax.lax.scan(again, comb, length=iters - 1)[0]


def _expand(h: Array, y: Array, post: Array, comb: Array) -> Array:
    # A sum over streams that fuses, where a product of four by four matrices would not.
    kept = jnp.sum(comb[..., None] * h.astype(F32)[..., :, None, :], axis=-3)
    return (post[..., None] * y.astype(F32)[..., None, :] + kept).astype(h.dtype)


def _expand_collapse_norm(
    collapse: Callable,
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    *,
    norm_eps: float,
) -> tuple[Array, Array]:
    h = _expand(h, y, post, comb)
    return h, rms_norm(collapse(h, pre), weight, norm_eps)
