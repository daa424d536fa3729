"""The sum over ranks that follows attention and experts, for use inside ``shard_map``; alone, or
with the expansion, collapse and RMSNorm that follow (ARCHITECTURE sections 3 and 7). And the gather
of what ranks have of one array.

``mosaic`` stores to the memory of the other GPUs of the host: ``table`` int32 [1, K] says where,
``sharding.peer`` makes it. ``slot``: the number of the sum modulo 3; every rank makes the same
calls in the same order, a program's number of sums is divisible by 3, and all calls that share a
table have its ``exchange``. ``half``: 0 or 1, another one than that of the gather before if no
call lies between. ``after``: an array that the call waits for, the result of the one
before it. A rank that gets no answer in time sets its error word and returns NaN. ``reference``
takes the same arguments and needs none of it. ``auto`` is the reference.
"""

from collections.abc import Callable

from jax import Array

from pallas_kernels.all_reduce import ref
from pallas_kernels.all_reduce.exchange import Exchange
from pallas_kernels.dispatch import choose


def build_all_reduce(kernels: str) -> Callable:
    """all_reduce(x bf16 [R, D], table, after, axes, *, exchange, slot) -> bf16 [R, D]

    The sum over the ranks of the axes, in float32 in their order and rounded once: the same bits on
    every rank. Zero comes out as +0.0, NaN as any NaN. R at most 64, D a multiple of 8.
    """
    return choose("all_reduce", _named(kernels), {"reference": _all_reduce, "mosaic": _peer})


def build_gather(kernels: str) -> Callable:
    """gather(x [R, N], table, after, axes, *, exchange, half, union) -> [R, ranks * N], of all
    ranks side by side; or with union [R, N], every bit that any rank has set: the sum where at most
    one rank has other than zeros.

    Any dtype of 1, 2 or 4 bytes, N of whole 16 bytes, R * N in the exchange's room. Bits stay what
    they are, but for an aligned word 0x80008000 (two bf16 -0.0), which arrives as 0.
    """
    return choose("gather", _named(kernels), {"reference": _gather, "mosaic": _peer_gather})


def build_report(kernels: str) -> Callable:
    """report(table, after, axes, *, exchange) -> int32 [1]

    The error word of this rank once ``after`` is there: 0, or 1 + the rank that did not answer.
    """
    return choose("all_reduce report", _named(kernels), {"reference": _zero, "mosaic": _report})


def build_all_reduce_norm(kernels: str) -> Callable:
    """all_reduce_norm(h, y, post, comb, pre, weight, table, after, axes, *, exchange, slot,
    norm_eps) -> streams bf16 [R, 4, D], normed bf16 [R, D]

    ``mhc.op.build_expand_collapse_norm`` of h [R, 4, D] and the sum of y [R, D] over the ranks.
    ``mosaic``: bf16, an exchange of one crossing, D up to 5120; the same bits as the two kernels
    one after the other.
    """
    kinds = {"reference": _all_reduce_norm, "mosaic": _peer_norm}
    return choose("all_reduce_norm", _named(kernels), kinds)


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # needs memory of its own: only by name


def _all_reduce(
    x: Array, table: Array, after: Array, axes: tuple[str, ...], *, exchange: Exchange, slot: int
) -> Array:
    return ref.all_reduce(x, axes)


def _zero(table: Array, after: Array, axes: tuple[str, ...], *, exchange: Exchange) -> Array:
    return table[0, :1] * 0


def _all_reduce_norm(
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    table: Array,
    after: Array,
    axes: tuple[str, ...],
    *,
    exchange: Exchange,
    slot: int,
    norm_eps: float,
) -> tuple[Array, Array]:
    return ref.all_reduce_norm(h, y, post, comb, pre, weight, axes, norm_eps=norm_eps)


def _peer(
    x: Array, table: Array, after: Array, axes: tuple[str, ...], *, exchange: Exchange, slot: int
) -> Array:
    from pallas_kernels.all_reduce import kernel_sm90

    return kernel_sm90.all_reduce(x, table, after, exchange=exchange, slot=slot)


def _gather(
    x: Array,
    table: Array,
    after: Array,
    axes: tuple[str, ...],
    *,
    exchange: Exchange,
    half: int,
    union: bool,
) -> Array:
    return ref.gather(x, axes, exchange=exchange, union=union)


def _peer_gather(
    x: Array,
    table: Array,
    after: Array,
    axes: tuple[str, ...],
    *,
    exchange: Exchange,
    half: int,
    union: bool,
) -> Array:
    from pallas_kernels.all_reduce import kernel_sm90

    return kernel_sm90.gather(x, table, after, exchange=exchange, half=half, union=union)


def _report(table: Array, after: Array, axes: tuple[str, ...], *, exchange: Exchange) -> Array:
    from pallas_kernels.all_reduce import kernel_sm90

    return kernel_sm90.report(table, after, exchange=exchange)


def _peer_norm(
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    table: Array,
    after: Array,
    axes: tuple[str, ...],
    *,
    exchange: Exchange,
    slot: int,
    norm_eps: float,
) -> tuple[Array, Array]:
    from pallas_kernels.all_reduce import kernel_sm90

    return kernel_sm90.all_reduce_norm(
        h, y, post, comb, pre, weight, table, after, exchange=exchange, slot=slot, norm_eps=norm_eps
    )
