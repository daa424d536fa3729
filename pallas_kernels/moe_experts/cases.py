"""Cases of ``moe_experts``: shapes shared by tests and ``pallas_kernels.bench``, random weights,
uniform routing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.addends import Addends
from pallas_kernels.bench import Problem
from pallas_kernels.check import (
    DRAWN,
    Check,
    Program,
    along_rows,
    exact,
    near,
    near_overall,
    ones,
    rows_alone,
    same,
    take,
)
from pallas_kernels.check.bounds import REFERENCE_REL_RMS, SERVING_REL
from pallas_kernels.moe_experts import decode_plan, prefill_plan, ref
from pallas_kernels.moe_experts.op import build
from pallas_kernels.moe_experts.prefill_shape import GROUP, TILE, Shape
from pallas_kernels.moe_experts.repack import PackedExperts
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import REFERENCE, SERVING, Numerics
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, dequantized

F32 = jnp.float32
LIMIT = 10.0
ROUTINGS = {"decode": 16, "prefill": 4}  # different routings, taken in turn


@dataclass(frozen=True)
class Layout:
    """What one GPU holds of a layer: ``local`` experts of ``width`` columns each."""

    name: str
    local: int
    width: int
    experts: int = 384
    hidden: int = 5120
    top_k: int = 6


@dataclass(frozen=True)
class Case:
    rows: int
    layout: Layout
    phase: str = "decode"

    def __str__(self) -> str:
        return f"phase={self.phase},rows={self.rows},layout={self.layout.name}"


LAYOUTS = (Layout("tp1", 384, 2304), Layout("tp8", 384, 288), Layout("ep8", 48, 2304))
DRAFT = Layout("draft", 128, 2304, experts=128, top_k=3)
CASES = (
    *(
        Case(rows, layout, phase)
        for layout in LAYOUTS
        for phase, bucket in (("decode", (1, 8, 32, 128)), ("prefill", (512, 8192, 32768)))
        for rows in bucket
    ),
    *(Case(rows, DRAFT) for rows in (5, 80)),
    *(Case(rows, DRAFT, "prefill") for rows in (160, 8192)),
)
_OTHERS = (Layout("tp4", 384, 576), Layout("ep2", 192, 2304), Layout("ep16", 24, 2304))
_ODD = (("decode", 2), ("decode", 17), ("prefill", 129), ("prefill", 1000))
CHECKED = (
    *(Case(rows, LAYOUTS[0]) for rows in (2, 6, 7)),
    *CASES,
    *(Case(rows, layout, phase) for layout in (*_OTHERS, LAYOUTS[2]) for phase, rows in _ODD),
)


def random_weights(
    key: Array, local: int, width: int, hidden: int
) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts ``Fp4Rows`` and a shared one ``Fp8Blocks``: random codes, scales near 2^-7."""

    def fp4(key: Array, n: int, k: int) -> Fp4Rows:
        a, b = jax.random.split(key)
        codes = jax.random.bits(a, (local, n, k // 2), jnp.uint8)
        return Fp4Rows(
            codes, jax.random.randint(b, (local, n, k // 32), 118, 122).astype(jnp.uint8)
        )

    def fp8(key: Array, n: int, k: int) -> Fp8Blocks:
        a, b = jax.random.split(key)
        codes = jax.random.normal(a, (n, k), F32).astype(jnp.float8_e4m3fn)
        scales = jax.random.randint(b, (n // 32, k // 32), 120, 124).astype(jnp.uint8)
        return Fp8Blocks(codes, scales)

    keys = jax.random.split(key, 6)
    dims = ((width, hidden), (width, hidden), (hidden, width))
    routed = ExpertWeights(*(fp4(k, *nk) for k, nk in zip(keys[:3], dims, strict=True)))
    return routed, ExpertWeights(*(fp8(k, *nk) for k, nk in zip(keys[3:], dims, strict=True)))


def routings(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Local ids int32 [routings, R, k] (-1 for experts held elsewhere) and weights; uniform,
    without replacement.
    """
    rng = np.random.default_rng(seed)
    layout = case.layout
    order = rng.random((ROUTINGS[case.phase], case.rows, layout.experts), np.float32)
    order = order.argpartition(layout.top_k, axis=-1)[..., : layout.top_k]
    ids = np.where(order < layout.local, order, -1).astype(np.int32)
    weights = rng.random(ids.shape, np.float32) + 0.1
    return ids, (1.5 * weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@lru_cache(maxsize=1)
def _weights(layout: Layout, seed: int) -> tuple[ExpertWeights, ExpertWeights]:
    make = jax.jit(random_weights, static_argnums=(1, 2, 3))
    return make(jax.random.key(seed), layout.local, layout.width, layout.hidden)


@lru_cache(maxsize=1)
def _packed(layout: Layout, seed: int) -> PackedExperts:
    from pallas_kernels.moe_experts.repack import pack

    return pack(*_weights(layout, seed))


def xla_path(
    x: Array, ids: Array, weights: Array, experts: ExpertWeights, shared: ExpertWeights
) -> Array:
    """The best plain XLA program found for few rows: a loop over the experts touched, weights
    dequantised to bf16.
    """
    rows, d = x.shape
    plan = decode_plan.make_plan(ids, weights, experts.w1.shape[0])
    pairs, picked = plan.pairs.reshape(-1, 8), plan.weights.reshape(-1, 8)
    dot = partial(jnp.einsum, "tk,nk->tn", preferred_element_type=F32)

    def ffn(x: Array, w: ExpertWeights, scale: Array | float) -> Array:
        return _ffn(x, w, scale, dot)

    def item(i: Array, total: Array) -> Array:
        w = jax.tree.map(lambda m: m[plan.expert[i]], experts)
        row = jnp.maximum(pairs[i], 0) // ids.shape[1]
        y = ffn(x[row], w, picked[i][:, None])
        return total.at[row].add(jnp.where(pairs[i][:, None] >= 0, y, 0))

    total = jax.lax.fori_loop(0, plan.items[0], item, jnp.zeros((rows, d), F32))
    return (total + ffn(x, shared, 1.0)).astype(jnp.bfloat16)


def _ffn(x: Array, w: ExpertWeights, scale: Array | float, dot: Callable) -> Array:
    """dot(tokens, matrix [..., N, K]) -> f32 [T, N]."""
    w1, w3, w2 = (dequantized(m, jnp.bfloat16) for m in (w.w1, w.w3, w.w2))
    up = jnp.clip(dot(x, w3), -LIMIT, LIMIT)
    t = jax.nn.silu(jnp.minimum(dot(x, w1), LIMIT)) * up * scale
    return dot(t.astype(jnp.bfloat16), w2)


def xla_tiles(
    x: Array, ids: Array, weights: Array, experts: ExpertWeights, shared: ExpertWeights
) -> Array:
    """For many rows: a loop over runs of at most ``TILE`` rows of an expert, its weights
    dequantised for each. ``lax.ragged_dot`` multiplies every row by every expert.
    """
    rows, d = x.shape
    count, width = experts.w1.shape[:2]
    s = Shape(rows, ids.shape[1], count, d, width, LIMIT, blocks=1)
    plan = prefill_plan.make_plan(ids, weights, s)
    expert, first, groups = plan.items[1:].reshape(3, -1)
    row_at = jnp.pad(plan.rows, (0, TILE), constant_values=-1)
    picked = jnp.pad(plan.weights, (0, TILE))
    dot = partial(jnp.einsum, "tk,nk->tn", preferred_element_type=F32)

    def item(i: Array, total: Array) -> Array:
        w = jax.tree.map(lambda m: m[expert[i]], experts)
        row, weight = (
            jax.lax.dynamic_slice_in_dim(a, GROUP * first[i], TILE) for a in (row_at, picked)
        )
        row = jnp.where(jnp.arange(TILE) < GROUP * groups[i], row, -1)
        y = _ffn(x[jnp.maximum(row, 0)], w, weight[:, None], dot)
        return total.at[jnp.where(row >= 0, row, rows)].add(y, mode="drop")

    total = jax.lax.fori_loop(0, plan.items[0], item, jnp.zeros((rows, d), F32))
    return (total + _ffn(x, shared, 1.0, dot)).astype(jnp.bfloat16)


def problem(case: Case, impl: str, seed: int) -> Problem:
    layout, prefill = case.layout, case.phase == "prefill"
    ids, weights = routings(case, seed)
    executions = {"pallas": 32 if case.rows == 1 else 16, "xla": 2}[impl]
    if prefill:
        executions = {"pallas": 4, "xla": 1}[impl]
    keys = jax.random.split(jax.random.key(seed + 1), executions if prefill else 1)
    xs = [jax.random.normal(key, (case.rows, layout.hidden), jnp.bfloat16) for key in keys]
    if impl == "pallas":
        from pallas_kernels.moe_experts import kernel_sm90 as kernels

        shared = (_weights(layout, seed)[1],) * prefill
        data = (_packed(layout, seed), *shared)
        kernel = kernels.moe_experts_prefill if prefill else kernels.moe_experts_decode
        sizes = {"experts": layout.local, "width": layout.width, "limit": LIMIT}
        run = jax.jit(partial(kernel, numerics=SERVING, **sizes))  # traced once for all executions
    else:
        data, run = _weights(layout, seed), xla_tiles if prefill else xla_path

    def call(i: int, carry: Array, data: tuple) -> Array:
        ids, weights, xs, *rest = data
        ids, weights, x = (a[i % len(a)] for a in (ids, weights, xs))
        # Times zero: each execution waits for the one before it. Few rows do so by x, so that XLA
        # cannot share what depends on it alone; to add to many would cost time, so those differ.
        if prefill:
            return run(x, ids + (0 * carry[0, 0]).astype(jnp.int32), weights, *rest)
        return run(x + 0 * carry, ids, weights, *rest)

    touched = np.mean([len(np.unique(one[one >= 0])) for one in ids])
    pairs = np.mean([(one >= 0).sum() for one in ids])
    matrix = 3 * layout.hidden * layout.width
    packed = touched * matrix / 2
    nbytes = packed * (1 + 1 / 16) + matrix * (1 + 1 / 1024) + 4 * xs[0].size
    return Problem(
        call=call,
        carry=jnp.zeros_like(xs[0]),
        data=(jnp.asarray(ids), jnp.asarray(weights), xs, *data),
        nbytes=float(nbytes),
        flops=float(2 * matrix * (pairs + case.rows)),
        executions=executions,
        extra={"packed_gbps": lambda us: packed / us / 1e3},
    )


def _spoiled(experts: ExpertWeights | PackedExperts, count: int) -> ExpertWeights | PackedExperts:
    """All bits of every second expert set."""
    if isinstance(experts, PackedExperts):
        return replace(experts, up=_spoil(experts.up, count), down=_spoil(experts.down, count))
    return jax.tree.map(lambda plane: _spoil(plane, count), experts)


@partial(jax.jit, static_argnums=1)
def _spoil(plane: Array, count: int) -> Array:
    odd = jnp.arange(count)[:, None] % 2 == 1
    return jnp.where(odd, ones(plane), plane.reshape(count, -1)).reshape(plane.shape)


@lru_cache
def _reference(numerics: Numerics) -> Callable:
    """Compiled once for cases that compare as many rows."""
    return exact(partial(ref.moe_experts, limit=LIMIT, numerics=numerics))


@jax.jit
def _hidden(live: Array, x: Array, ids: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Inputs whose rows but the live ones reach no expert and hold NaN."""
    at = along_rows(live, x)
    ids = jnp.where(at, ids, -1)
    return jnp.where(at, x, ones(x)), ids, jnp.where(at, weights, ones(weights))


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """``run`` takes weights as released; the kernels take them packed, and leave few rows in parts
    too. Of many rows ``DRAWN`` are compared with the reference.
    """
    released, shared = _weights(case.layout, seed)
    experts = released if run else _packed(case.layout, seed)
    own, run = run is None, run or build("mosaic")
    ids, weights = (jnp.asarray(a[0]) for a in routings(case, seed))
    x = jax.random.normal(jax.random.key(seed + 1), (case.rows, case.layout.hidden), jnp.bfloat16)
    drawn = np.sort(np.random.default_rng(seed).permutation(case.rows)[:DRAWN])
    nobody = jnp.full_like(ids, -1)
    routes = {
        "drawn rows": ids,
        "one expert takes all rows": nobody.at[:, 0].set(0),
        "no expert takes a row": nobody,
    }
    for numerics in (SERVING, REFERENCE):
        options = {"limit": LIMIT, "numerics": numerics}
        program = Program(partial(run, **options), x, ids, weights, experts, shared)
        kind = f"{numerics.name}: "
        for name, picked in routes.items():
            want = _reference(numerics)(*take((x, picked, weights), drawn), released, shared)
            got = take(program(x, picked, weights, experts, shared), drawn)
            if numerics is SERVING:
                yield near(kind + name, got, want, SERVING_REL)
            else:
                yield near_overall(kind + name, got, want, REFERENCE_REL_RMS)
        yield from _properties(case, seed, kind, program, (x, ids, weights), experts, shared)
    if own and isinstance(experts, PackedExperts):
        from pallas_kernels.moe_experts.kernel_sm90 import MOST_ROWS

        if case.rows <= MOST_ROWS:
            yield from in_parts(
                case, seed, run, (x, ids, weights), routes, experts, shared, released
            )


def in_parts(
    case: Case,
    seed: int,
    run: Callable,
    rows: tuple[Array, Array, Array],
    routes: dict[str, Array],
    experts: PackedExperts,
    shared: ExpertWeights,
    released: ExpertWeights,
) -> Iterator[Check]:
    """Rows whose sums are left to be added."""
    x, ids, weights = rows
    kind = "serving, in parts: "

    def whole(*operands: Array | PackedExperts | ExpertWeights) -> Array:
        y = run(*operands, limit=LIMIT, numerics=SERVING, parts=True)
        assert isinstance(y, Addends)
        return y.total(jnp.bfloat16)

    program = Program(whole, x, ids, weights, experts, shared)
    for name, picked in routes.items():
        want = _reference(SERVING)(x, picked, weights, released, shared)
        got = program(x, picked, weights, experts, shared)
        yield near(kind + name, got, want, SERVING_REL)
    yield from _properties(case, seed, kind, program, rows, experts, shared)


def _properties(
    case: Case,
    seed: int,
    kind: str,
    program: Program,
    rows: tuple[Array, Array, Array],
    experts: ExpertWeights | PackedExperts,
    shared: ExpertWeights,
) -> Iterator[Check]:
    """What must not change a bit of x, ids and weights' results."""
    rng = np.random.default_rng(seed)
    got = program(*rows, experts, shared)
    yield same(f"{kind}another run", program(*rows, experts, shared), got)

    def hide(live: Array) -> tuple:
        return *_hidden(live, *rows), experts, shared

    yield from rows_alone(program, hide, case.rows, got, rng, kind)
    order = rng.permutation(case.rows)
    mixed = program(*take(rows, order), experts, shared)
    yield same(f"{kind}rows in another order", mixed, take(got, order))
    x, ids, weights = rows
    even = jnp.where(ids % 2 == 0, ids, -1)
    clean = program(x, even, weights, experts, shared)
    spoiled = program(x, even, weights, _spoiled(experts, case.layout.local), shared)
    yield same(f"{kind}experts that none reaches poisoned", spoiled, clean)
