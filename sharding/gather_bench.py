"""Bits and times of the peer-to-peer gather, as ``peer_bench`` has them of the sum."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.all_reduce import ref
from sharding.peer import PeerCalls, PeerMemory
from sharding.peer_bench import AXES, SPEC, Bench, compare, layers, row, scramble, times


def gathers(bench: Bench) -> dict[str, Any]:
    """``peer_bench.sums`` of a sum that every rank takes of the rows gathered, in every other call
    from the union of padded ones.
    """
    ranks = len(bench.devices)

    def exchange(x: Array, gather: Callable) -> Array:
        for i in range(bench.layers):
            x = scramble(x, i, ranks)
            rows = gather(_padded(x, ranks), union=True) if i % 2 else gather(x)
            x = _added(rows, ranks)
        return x

    def inside(memory: PeerMemory, x: Array, table: Array) -> tuple:
        with memory.calls(table) as calls:
            return exchange(x, partial(calls.gather, axes=AXES)), calls.finish()

    def summed(x: Array) -> Array:
        for i in range(bench.layers):
            x = ref.all_reduce(scramble(x, i, ranks), AXES)
        return x

    memory = bench.memory()
    peer = bench.program(partial(inside, memory), (SPEC, SPEC), donate=1)
    plain = bench.program(summed, (SPEC,), donate=1)
    wrong = compare(bench, memory, lambda x: peer(x, memory.table), plain, bench.draw_rows)

    def by_gather(calls: PeerCalls, x: Array) -> Array:
        return _added(calls.gather(x, AXES), ranks)

    others = {
        "none": lambda y: _added(jnp.tile(y, (1, ranks)), ranks),
        "xla": partial(ref.all_reduce, axes=AXES),
    }
    layer_us = times(bench, layers(bench, by_gather, others))
    return row(bench, wrong, layer_us, layer_us["peer"])


def _padded(x: Array, ranks: int) -> Array:
    """x [R, D] in this rank's columns of zeros [R, ranks * D]."""
    blank, first = jnp.zeros((len(x), ranks * x.shape[1]), x.dtype), jax.lax.axis_index(AXES)
    return jax.lax.dynamic_update_slice(blank, x, (0, first * x.shape[1]))


def _added(rows: Array, ranks: int) -> Array:
    """Rows [R, ranks * D] of all ranks side by side, summed [R, D]."""
    return ref.sum_of(jnp.moveaxis(rows.reshape(len(rows), ranks, -1), 1, 0))
