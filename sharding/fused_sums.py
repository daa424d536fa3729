"""Sums over tensor ranks that the pass over the residual streams behind them takes in.

A sublayer's output is added to the streams, collapsed and normed (ARCHITECTURE section 7). Where a
peer-to-peer sum fits into that pass, the sublayer hands on its own rank's part unsummed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jax import Array

from pallas_kernels.all_reduce.exchange import MAX_ROWS
from sharding.collectives import peer_all_reduce
from sharding.peer import Axes, traced_calls


@dataclass(frozen=True)
class Unsummed:
    """This rank's part bf16 [..., D] of a sum over the ranks of ``axes``."""

    part: Array
    axes: Axes

    def reshape(self, shape: tuple[int, ...]) -> "Unsummed":
        return replace(self, part=self.part.reshape(shape))


def fusing_all_reduce(x: Array, axes: Axes) -> Array | Unsummed:
    """``peer_all_reduce``, left to the pass over the streams where the exchange of the program that
    is traced fits it.
    """
    if axes and x.size <= MAX_ROWS * x.shape[-1]:
        memory = traced_calls().memory
        if memory.exchange.fuses and axes == memory.axes:
            return Unsummed(x, axes)
    return peer_all_reduce(x, axes)


@dataclass(frozen=True)
class FusedStreams:
    """``mhc_expand`` and ``mhc_expand_collapse_norm`` of outputs that may be unsummed. expand_op,
    norm_op: those of one device.
    """

    expand_op: Callable
    norm_op: Callable

    def expand(self, h: Array, y: Array | Unsummed, post: Array, comb: Array) -> Array:
        if isinstance(y, Unsummed):
            y = peer_all_reduce(y.part, y.axes)
        return self.expand_op(h, y, post, comb)

    def expand_collapse_norm(
        self,
        h: Array,
        y: Array | Unsummed,
        post: Array,
        comb: Array,
        pre: Array,
        weight: Array,
        *,
        norm_eps: float,
    ) -> tuple[Array, Array]:
        if not isinstance(y, Unsummed):
            return self.norm_op(h, y, post, comb, pre, weight, norm_eps=norm_eps)
        lead, d = y.part.ndim - 1, y.part.shape[-1]
        rows = y.part.size // d

        def flat(array: Array) -> Array:
            return array.reshape(rows, *array.shape[lead:])

        streams, normed = traced_calls().all_reduce_norm(
            flat(h), flat(y.part), flat(post), flat(comb), flat(pre), weight, norm_eps=norm_eps
        )
        return streams.reshape(h.shape), normed.reshape(y.part.shape)
