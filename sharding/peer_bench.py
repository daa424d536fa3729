"""Bits and times of the peer-to-peer all-reduce on the devices of this process, ``psum`` beside it.

A step is a donated chain of 81 layers. Times are of layers with a pair of products and a norm; the
cost of a call is what a layer takes more than the same layer without a sum.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor, log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.compiling import jit
from pallas_kernels.all_reduce import ref
from pallas_kernels.all_reduce.cases import Case
from pallas_kernels.mhc.op import build_expand_collapse_norm
from pallas_kernels.norm import rms_norm
from sharding.collectives import all_reduce
from sharding.peer import PeerCalls, PeerMemory
from sharding.watchdog import StuckStep

BF16, F32 = jnp.bfloat16, jnp.float32
AXES = ("model",)
STREAMS = 4
NORM_EPS = 1e-6
SPEC, WHOLE = PartitionSpec(AXES), PartitionSpec()


@dataclass(frozen=True)
class Bench:
    """``layers`` sums of the case over the devices. skew: products of so many rows that keep one
    device busy before some of the executions.
    """

    devices: tuple[Any, ...]
    case: Case
    layers: int = 81
    executions: int = 300
    skew: int = 4096
    kernels: str = "mosaic"
    timeout_s: float = 2.0

    @property
    def rows(self) -> int:
        return self.case.rows

    @property
    def width(self) -> int:
        return self.case.width

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), AXES)

    def memory(self) -> PeerMemory:
        return PeerMemory.make(
            self.mesh,
            AXES,
            rows=self.rows,
            width=self.width,
            timeout_s=self.timeout_s,
            room=2 * self.rows * self.width * len(self.devices),
            kernels=self.kernels,
        )

    def program(self, step: Callable, inputs: Sequence[PartitionSpec], donate: int = 0) -> Callable:
        """``step`` of the ranks' parts; the first ``donate`` arguments come back first."""
        function = jax.shard_map(
            step, mesh=self.mesh, in_specs=tuple(inputs), out_specs=SPEC, check_vma=False
        )
        return jit(function, donate=tuple(range(donate)))

    def normal(self, *shapes: tuple[int, ...]) -> Callable[[int], Any]:
        """seed -> an array for each shape, other values on every rank: [ranks * shape[0], ...]; a
        quarter of them are -0.0, of which the sentinel is made.
        """

        def draw(seed: Array) -> tuple[Array, ...]:
            key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index(AXES))
            keys = jax.random.split(key, len(shapes))
            drawn = [jax.random.normal(k, s, BF16) for k, s in zip(keys, shapes, strict=True)]
            return tuple(jnp.where(jnp.abs(x) < 0.3, BF16(-0.0), x) for x in drawn)

        return self.program(draw, (WHOLE,))

    @property
    def draw_rows(self) -> Callable[[int], Array]:
        draw = self.normal((self.rows, self.width))
        return lambda seed: draw(seed)[0]

    @property
    def draw_streams(self) -> Callable[[int], tuple[Array, Array]]:
        """Streams and rows."""
        return self.normal((self.rows, STREAMS, self.width), (self.rows, self.width))


def scramble(x: Array, layer: int, ranks: int) -> Array:
    """Exact: what every rank makes of the same x differs in order, signs and last bits, zeros only
    in sign; the sum is about as large as x.
    """
    rank, half = jax.lax.axis_index(AXES), log2(ranks) / 2
    scaled = x * BF16(2.0 ** -(ceil(half) if layer % 2 else floor(half)))
    columns = jnp.arange(x.shape[1], dtype=jnp.uint32) + jnp.uint32(977) * rank.astype(jnp.uint32)
    hashed = columns * jnp.uint32(2654435761)
    signs, last = ((hashed >> n & m).astype(jnp.uint16) for n, m in ((16, 0x8000), (20, 7)))
    moved = jnp.roll(scaled, 1 + 37 * rank, axis=1)
    flips = signs | jnp.where(moved == 0, 0, last).astype(jnp.uint16)
    bits = jax.lax.bitcast_convert_type(moved, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits ^ flips, BF16)


def sums(bench: Bench) -> dict[str, Any]:
    """Bits against the sum in order, then the cost of a call beside products and a norm."""

    def exchange(x: Array, reduce: Callable) -> Array:
        for i in range(bench.layers):
            x = reduce(scramble(x, i, len(bench.devices)))
        return x

    memory = bench.memory()
    peer = bench.program(partial(_with_memory, memory, exchange), (SPEC, SPEC), donate=1)
    plain = bench.program(lambda x: exchange(x, partial(ref.all_reduce, axes=AXES)), (SPEC,), 1)
    wrong = compare(bench, memory, lambda x: peer(x, memory.table), plain, bench.draw_rows)
    others = {"none": lambda y: y, "psum": lambda y: all_reduce(y, AXES)}
    by_stores = partial(PeerCalls.all_reduce, axes=AXES)
    layer_us = times(bench, layers(bench, by_stores, others))
    return row(bench, wrong, layer_us, layer_us["peer"])


def norms(bench: Bench) -> dict[str, Any]:
    """The same of the sum fused with expansion, collapse and norm, against the kernels in turn."""
    constants = _streams(bench)
    norm = partial(build_expand_collapse_norm(bench.kernels), norm_eps=NORM_EPS)

    def exchange(carry: tuple, fused: Callable) -> tuple:
        for i in range(bench.layers):
            carry = fused(carry[0], scramble(carry[1], i, len(bench.devices)), *constants)
        return carry

    def in_turn(h: Array, y: Array, *mix: Array) -> tuple[Array, Array]:
        return norm(h, ref.all_reduce(y, AXES), *mix)

    def inside(memory: PeerMemory, carry: tuple, table: Array) -> tuple:
        with memory.calls(table) as calls:
            carry = exchange(carry, partial(calls.all_reduce_norm, norm_eps=NORM_EPS))
            return carry, calls.finish()

    memory = bench.memory()
    peer = bench.program(partial(inside, memory), (SPEC, SPEC), donate=1)
    plain = bench.program(lambda carry: exchange(carry, in_turn), (SPEC,), donate=1)
    wrong = compare(
        bench, memory, lambda carry: peer(carry, memory.table), plain, bench.draw_streams
    )
    layer_us = times(bench, _norm_layers(bench, constants))
    return row(bench, wrong, layer_us, layer_us["fused"])


def silent(bench: Bench) -> dict[str, Any]:
    """The last rank writes to itself: the first ones have to end with an error that names it."""
    memory = bench.memory()
    ranks, table = len(bench.devices), np.array(memory.table)
    own = table[-1, 2 * ranks - 2 : 2 * ranks]
    table[-1, : 2 * ranks] = np.tile(own, ranks)
    broken = replace(memory, table=jax.device_put(table, memory.table.sharding))

    def chain(x: Array, reduce: Callable) -> Array:
        for _ in range(bench.layers):
            x = reduce(x)
        return x

    step = bench.program(partial(_with_memory, broken, chain), (SPEC, SPEC), donate=1)
    began = time.perf_counter()
    _, errors = step(bench.draw_rows(0), broken.table)
    try:
        broken.check(errors, "0 of the silent rank")
    except StuckStep as error:
        seconds = time.perf_counter() - began
        return {"error": f"{error}; seen after {seconds:.1f} s", "wrong": 0}
    raise RuntimeError("a rank that sends nothing has gone unnoticed")


def compare(
    bench: Bench, memory: PeerMemory, peer: Callable, plain: Callable, draw: Callable
) -> int:
    """Bits of the results that differ in all executions, each from new values; now and then one
    device starts late.
    """

    def differ(got: Any, want: Any, wrong: Array) -> Array:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = (jax.lax.bitcast_convert_type(v, jnp.uint16) for v in (a, b))
            wrong = wrong + jnp.sum(jax.lax.population_count(a ^ b).astype(jnp.int32))
        return wrong

    count = bench.program(differ, (SPEC, SPEC, SPEC))
    wrong = jax.device_put(np.zeros(len(bench.devices), np.int32), NamedSharding(bench.mesh, SPEC))
    busy = jit(lambda x: x @ x @ x)
    squares = [jax.device_put(np.zeros((bench.skew,) * 2, BF16), d) for d in bench.devices]
    for i in range(bench.executions):
        want = plain(draw(i))
        values = draw(i)
        if i % 3 == 0:
            busy(squares[i // 3 % len(squares)])
        got, errors = peer(values)
        wrong = count(got, want, wrong)
        if i % 50 == 0 or i == bench.executions - 1:
            memory.check(errors, str(i))
    return int(np.asarray(wrong).sum())


def times(bench: Bench, variants: dict[str, tuple[Callable, Any]], repeats: int = 9) -> dict:
    """Microseconds of a layer by variant (a step, what it takes and gives back): medians of several
    measurements, the variants in turn.
    """
    carries = {name: jax.block_until_ready(step(carry)) for name, (step, carry) in variants.items()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, (step, _) in variants.items():
            carry = jax.block_until_ready(step(step(carries[name])))
            began = time.perf_counter()
            for _ in range(8):
                carry = step(carry)
            carries[name] = jax.block_until_ready(carry)
            found[name].append((time.perf_counter() - began) / 8 / bench.layers * 1e6)
    return {name: statistics.median(us) for name, us in found.items()}


def _with_memory(memory: PeerMemory, chain: Callable, x: Array, table: Array) -> tuple:
    with memory.calls(table) as calls:
        return chain(x, partial(calls.all_reduce, axes=AXES)), calls.finish()


def row(bench: Bench, wrong: int, us: dict[str, float], ours: float) -> dict[str, Any]:
    return {
        "rows": bench.rows,
        "width": bench.width,
        "calls": bench.layers,
        "executions": bench.executions,
        "wrong": wrong,
        "us": us,
        "cost_us": ours - us["none"],
        "goal_us": bench.case.goal_us,
    }


def _products(bench: Bench) -> tuple[Array, Array]:
    d, inner = bench.width, bench.width // 8
    first, second = jax.random.split(jax.random.key(1))
    w = jax.random.normal(first, (d, inner), BF16) / d**0.5
    return jax.device_put(
        (w.astype(BF16), (jax.random.normal(second, (inner, d), BF16) / inner**0.5).astype(BF16)),
        NamedSharding(bench.mesh, WHOLE),
    )


def layers(
    bench: Bench, by_stores: Callable, others: dict[str, Callable]
) -> dict[str, tuple[Callable, Any]]:
    """Steps x -> x with the sum "peer", by_stores(calls, x), and by each of the others."""
    w, v = _products(bench)
    weight = jnp.ones(bench.width, BF16)
    memory = bench.memory()

    def chain(x: Array, reduce: Callable, w: Array, v: Array) -> Array:
        for _ in range(bench.layers):
            x = rms_norm(reduce(x @ w @ v) + x, weight, NORM_EPS)
        return x

    def with_peers(x: Array, w: Array, v: Array, table: Array) -> tuple:
        with memory.calls(table) as calls:
            return chain(x, partial(by_stores, calls), w, v), calls.finish()

    def without(reduce: Callable) -> Callable:
        run = bench.program(lambda x, w, v: chain(x, reduce, w, v), (SPEC, WHOLE, WHOLE), 1)
        return lambda x: run(x, w, v)

    peers = bench.program(with_peers, (SPEC, WHOLE, WHOLE, SPEC), 1)
    steps = {name: without(reduce) for name, reduce in others.items()}
    steps["peer"] = lambda x: peers(x, w, v, memory.table)[0]
    draw = bench.draw_rows
    return {name: (step, draw(7)) for name, step in steps.items()}


def _streams(bench: Bench) -> tuple[np.ndarray, ...]:
    """post, comb, pre and the norm's weight: streams that neither grow nor vanish."""
    keys = jax.random.split(jax.random.key(2), 3)
    lead = (bench.rows, STREAMS)
    comb = jax.nn.softmax(jax.random.normal(keys[0], (*lead, STREAMS), F32), axis=-2)
    post, pre = (jax.random.uniform(key, lead, F32) for key in keys[1:])
    return tuple(np.asarray(a) for a in (post, comb, pre, jnp.ones(bench.width, BF16)))


def _norm_layers(bench: Bench, mix: tuple) -> dict[str, tuple[Callable, Any]]:
    """Steps (h, x) -> (h, x): the pass over the streams behind no sum, with the sum inside, behind
    peer stores and behind psum.
    """
    w, v = _products(bench)
    norm = partial(build_expand_collapse_norm(bench.kernels), norm_eps=NORM_EPS)

    def chain(carry: tuple, w: Array, v: Array, after: Callable) -> tuple:
        h, x = carry
        for _ in range(bench.layers):
            h, x = after(h, x @ w @ v, *mix)
        return h, x

    def behind(reduce: Callable) -> Callable:
        return lambda h, y, *mix: norm(h, reduce(y), *mix)

    def kinds(calls: PeerCalls) -> Iterator[tuple[str, Callable]]:
        yield "fused", partial(calls.all_reduce_norm, norm_eps=NORM_EPS)
        yield "peer", behind(partial(calls.all_reduce, axes=AXES))

    def with_peers(name: str) -> Callable:
        memory = bench.memory()

        def step(carry: tuple, w: Array, v: Array, table: Array) -> tuple:
            with memory.calls(table) as calls:
                return chain(carry, w, v, dict(kinds(calls))[name]), calls.finish()

        run = bench.program(step, (SPEC, WHOLE, WHOLE, SPEC), 1)
        return lambda carry: run(carry, w, v, memory.table)[0]

    def without(reduce: Callable) -> Callable:
        after = behind(reduce)
        run = bench.program(
            lambda carry, w, v: chain(carry, w, v, after), (SPEC, WHOLE, WHOLE), donate=1
        )
        return lambda carry: run(carry, w, v)

    steps = {
        "none": without(lambda y: y),
        "fused": with_peers("fused"),
        "peer": with_peers("peer"),
        "psum": without(lambda y: all_reduce(y, AXES)),
    }
    draw = bench.draw_streams
    return {name: (step, draw(7)) for name, step in steps.items()}
