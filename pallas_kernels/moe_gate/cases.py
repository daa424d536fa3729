"""Cases of ``moe_gate``: backbone and draft routers, random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, along_rows, exact, ones, rows_alone, same, take
from pallas_kernels.check.bounds import DOT_REL
from pallas_kernels.moe_gate import ref
from pallas_kernels.moe_gate.op import build
from pallas_kernels.moe_gate.ref import sqrt_softplus

F32 = jnp.float32
ROTATED_BYTES = 75e6  # of inputs taken in turn: more than L2 holds
EXECUTIONS = 24
SLOPE = 0.32  # at most, of a score by its logit


@dataclass(frozen=True)
class Case:
    rows: int
    experts: int = 384
    top_k: int = 6
    hidden: int = 5120
    scale: float = 1.5
    bias_rows: bool = False  # one row of bias for each row of x
    images: bool = False  # rows of images with another bias, and rows that are not live

    def __str__(self) -> str:
        kind = ",bias=rows" if self.bias_rows else ",bias=images" if self.images else ""
        return f"rows={self.rows},experts={self.experts},top_k={self.top_k}{kind}"


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
CHECKED = (
    *CASES,
    *(Case(rows) for rows in (2, 17, 300)),
    *(Case(rows, bias_rows=True) for rows in (5, 128, 2048)),
    *(Case(rows, images=True) for rows in (1, 8, 128, 2048)),
    Case(37, experts=256, top_k=8, hidden=512),
)


def inputs(case: Case, seed: int) -> tuple[Array, Array, Array]:
    """x bf16 [R, D], weight bf16 [E, D] and bias f32 [E] or [R, E]: logits spread by about 1."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (case.rows, case.hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.experts, case.hidden), F32)
    lead = (case.rows,) if case.bias_rows else ()
    bias = 0.1 * jax.random.normal(keys[2], (*lead, case.experts), F32)
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


@jax.jit
def _faults(
    scores: Array, bias: Array, margin: Array, ids: Array, weights: Array, scale: float
) -> tuple[Array, Array, Array]:
    """How many rows have an id twice or out of range; by how many margins [R] of a score a pick is
    behind the next one or behind an expert not picked; by how many a weight is off.
    """
    legal = (ids >= 0) & (ids < scores.shape[1])
    twice = jnp.sum(ids[:, :, None] == ids[:, None, :], axis=(1, 2)) > ids.shape[1]
    rank = scores + bias
    picked = jnp.take_along_axis(rank, ids, axis=1)
    left = jnp.max(rank.at[jnp.arange(len(ids))[:, None], ids].set(-jnp.inf), axis=1)
    following = jnp.concatenate([picked[:, 1:], left[:, None]], axis=1)
    late = jnp.max((following - picked) / margin[:, None], initial=0)
    s = jnp.take_along_axis(scores, ids, axis=1)
    total = jnp.sum(s, axis=1, keepdims=True) + 1e-20
    # A share moves by no more than its score and the total do, relative to the smallest score.
    error = jnp.abs(weights / scale - s / total) / (s / total)
    off = error * jnp.min(s, axis=1, keepdims=True) / margin[:, None]
    return jnp.sum(twice | ~jnp.all(legal, axis=1)), late, jnp.max(off)


@exact
def _margin(x: Array, weight: Array, bias: Array) -> Array:
    """f32 [R]: how far two scores of one row may move against each other when the sums of their
    logits are added in another order.
    """
    norms = [jnp.linalg.norm(a.astype(F32), axis=1) for a in (x, weight)]
    logits = DOT_REL * norms[0] * jnp.max(norms[1])
    highest = jnp.max(ref.scores(x, weight) + jnp.abs(bias), axis=1)
    return 2 * (SLOPE * logits + 2.0**-22 * (1 + highest))


@partial(jax.jit, static_argnums=(0, 1))
def _integers(case: Case, seed: int) -> tuple[Array, Array, Array]:
    """As ``inputs``: every order of addition gives the same logits, many of them equal."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.randint(keys[0], (case.rows, case.hidden), -1, 2)
    w = jax.random.randint(keys[1], (case.experts, case.hidden), -1, 2)
    bias = jnp.zeros((*[case.rows] * case.bias_rows, case.experts), F32)
    return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16) / 32, bias


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """Ids may differ from the reference's only where its scores are within ``_margin``."""
    options = {"top_k": case.top_k, "scale": case.scale}
    x, weight, bias = jax.jit(inputs, static_argnums=(0, 1))(case, seed)
    program = Program(partial(run or build("mosaic"), **options), x, weight, bias)
    ids, weights = got = program(x, weight, bias)
    margin, scores = _margin(x, weight, bias), exact(ref.scores)(x, weight)
    wrong, late, off = _faults(scores, bias, margin, ids, weights, case.scale)
    yield Check("ids twice or out of range, rows", float(wrong), 0)
    yield Check("ids against ref's scores, margins of float32", float(late), 1)
    yield Check("weights against ref's, margins of float32", float(off), 1)

    whole = _integers(case, seed)
    want = exact(partial(ref.moe_gate, **options))(*whole)
    yield same("ids of exact sums with ties", program(*whole)[0], want[0])
    equal = program(jnp.zeros_like(x), weight, jnp.zeros_like(bias))[0]
    lowest = jnp.broadcast_to(jnp.arange(case.top_k, dtype=jnp.int32), ids.shape)
    yield same("ids where all scores are equal", equal, lowest)

    yield same("another run", program(x, weight, bias), got)
    rng = np.random.default_rng(seed)

    @jax.jit
    def hide(live: Array) -> tuple[Array, Array, Array]:
        hidden = bias
        if case.bias_rows:
            hidden = jnp.where(live[:, None], bias, ones(bias))
        return jnp.where(along_rows(live, x), x, ones(x)), weight, hidden

    yield from rows_alone(program, hide, case.rows, got, rng)
    order = rng.permutation(case.rows)
    mixed = program(take(x, order), weight, take(bias, order) if case.bias_rows else bias)
    yield same("rows in another order", mixed, take(got, order))
    if case.images:
        yield from _images(run or build("mosaic"), options, whole, rng)


def _images(
    run: Callable, options: dict, whole: tuple[Array, Array, Array], rng: np.random.Generator
) -> Iterator[Check]:
    """Rows of images take the other bias, rows that are not live reach no expert; ``whole`` are
    operands of exact sums.
    """
    x, weight, bias = whole
    other = jnp.asarray(rng.integers(-2, 3, len(bias)), F32)
    image, live = (jnp.asarray(rng.random(len(x)) < share) for share in (0.5, 0.8))
    operands = x, weight, bias, other, image, live
    want = exact(partial(ref.moe_gate, **options))(*operands)
    got = Program(partial(run, **options), *operands)(*operands)
    yield same("ids of images and of rows that are not live", got[0], want[0])
