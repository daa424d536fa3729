"""Peer-to-peer sums and gathers in a program: shared memory, its table, and the calls of one step.

One ``PeerMemory`` for each executable, made once and kept as long as that runs. A program takes
its table as an argument, never donated, and makes its calls inside ``PeerMemory.calls``:

    memory = PeerMemory.make(mesh, ("model",), rows=8, width=5120)
    def step(x, table):                      # inside shard_map; table by memory.table_spec
        with memory.calls(table) as calls:
            y = calls.all_reduce(x, axes)    # or an op built with all_reduce="peer"
            return y, calls.finish()         # errors, by memory.table_spec
    memory.check(errors, "decode 17")        # StuckStep if a rank got no answer
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.errors import UserError
from pallas_kernels.all_reduce.exchange import HALVES, SENTINEL, SLOTS, VECTOR_BYTES, Exchange
from pallas_kernels.all_reduce.op import (
    build_all_reduce,
    build_all_reduce_norm,
    build_gather,
    build_report,
)
from sharding.watchdog import StuckStep

Axes = tuple[str, ...]
SUM, GATHER = "sum", "gather"


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """Memory of all ranks of a mesh for sums over ``axes`` of bf16 [exchange.rows, exchange.width].

    slots: int32 [devices, words], which the kernels write to by its addresses. table: int32
    [devices, table_words], where each device finds the slots of its group.
    """

    mesh: Mesh
    axes: Axes
    exchange: Exchange
    kernels: str
    slots: Array
    table: Array

    @classmethod
    def make(
        cls,
        mesh: Mesh,
        axes: Axes,
        *,
        rows: int,
        width: int,
        timeout_s: float = 5.0,
        room: int = 0,
        kernels: str = "mosaic",
    ) -> "PeerMemory":
        """UserError if another process holds some of the devices, or they lack the kernel;
        ValueError for a shape that it does not take. room: bytes of one rank in a gather. kernels
        "reference": the same calls by XLA.
        """
        ranks = prod(mesh.shape[axis] for axis in axes)
        exchange = Exchange(ranks, rows, width, timeout_s, room)
        check_devices(mesh, kernels)
        devices = list(mesh.devices.flat)
        empty = np.full((1, exchange.words), SENTINEL, np.uint32).view(np.int32)
        empty[:, exchange.fault // 4 : exchange.gathers // 4] = 0
        # No program takes the slots as an argument, so nothing else waits for them to be filled.
        slots = jax.block_until_ready(_spread(mesh, [empty] * len(devices)))
        held = {s.device: s.data.unsafe_buffer_pointer() for s in slots.addressable_shards}
        rows_of = {}
        for group in groups(mesh, axes):
            addresses = np.array([held[device] for device in group], np.uint64).view(np.int32)
            for rank, device in enumerate(group):
                rows_of[device] = np.array([[*addresses, rank, 0]], np.int32)
        table = _spread(mesh, [rows_of[device] for device in devices])
        return cls(mesh, axes, exchange, kernels, slots, table)

    @property
    def table_spec(self) -> PartitionSpec:
        """Of the table, and of the errors that a step returns."""
        return PartitionSpec(self.mesh.axis_names)

    @contextmanager
    def calls(self, table: Array) -> Iterator["PeerCalls"]:
        """The calls of one program while it is traced; table int32 [1, K]: this rank's."""
        calls = PeerCalls(self, table)
        token = _TRACED.set(calls)
        try:
            yield calls
        finally:
            _TRACED.reset(token)

    def check(self, errors: Any, step: str) -> None:
        """StuckStep that names the ranks (positions in the mesh) of which one waited in vain for
        the other, if a step's errors int32 [devices] say so; the memory is useless from then on.
        """
        codes = np.asarray(errors)
        if codes.any():
            place = int(np.flatnonzero(codes)[0])
            devices = list(self.mesh.devices.flat)
            group = next(g for g in groups(self.mesh, self.axes) if devices[place] in g)
            late = devices.index(group[int(codes[place]) - 1])
            raise StuckStep(
                f"step {step}: rank {place} got no answer from rank {late} within"
                f" {self.exchange.timeout_s:g} s in a sum or gather"
            )


@dataclass(eq=False)
class PeerCalls:
    """Calls of one program in their order; made by ``PeerMemory.calls``."""

    memory: PeerMemory
    table: Array
    kinds: list[str] = field(default_factory=list)
    last: Array | None = field(default=None, repr=False)

    def count(self, kind: str) -> int:
        """Calls so far: SUM or GATHER."""
        return self.kinds.count(kind)

    def all_reduce(self, x: Array, axes: Axes) -> Array:
        """The sum over the axes, those of the memory, of x bf16 [..., D], as many rows as its
        exchange has.
        """
        e = self.memory.exchange
        self._check_axes(axes)
        if not self.sums(x):
            raise ValueError(f"{x.shape=} {x.dtype=} must be bfloat16 of {e.rows} x {e.width}")
        flat = x.reshape(e.rows, e.width)
        return self._sum(build_all_reduce(self.memory.kernels), flat).reshape(x.shape)

    def sums(self, x: Array) -> bool:
        """Whether ``all_reduce`` takes arrays of that shape."""
        e = self.memory.exchange
        return x.dtype == "bfloat16" and x.size == e.rows * e.width and x.shape[-1] == e.width

    def all_reduce_norm(
        self,
        h: Array,
        y: Array,
        post: Array,
        comb: Array,
        pre: Array,
        weight: Array,
        *,
        norm_eps: float,
    ) -> tuple[Array, Array]:
        """``build_all_reduce_norm``: the streams and the normed rows of h [R, 4, D] and the sum of
        y [R, D].
        """
        run = build_all_reduce_norm(self.memory.kernels)
        return self._sum(run, h, y, post, comb, pre, weight, norm_eps=norm_eps)

    def gather(self, x: Array, axes: Axes, *, union: bool = False) -> Array:
        """``build_gather`` of x [R, N] over the axes, those of the memory; rows of any length, in
        all at most its room.
        """
        self._check_axes(axes)
        n, multiple = x.shape[1], VECTOR_BYTES // x.dtype.itemsize
        padded = jnp.pad(x, ((0, 0), (0, -n % multiple)))
        half = self.count(GATHER) % HALVES
        self.kinds.append(GATHER)
        run = build_gather(self.memory.kernels)
        found = self._run(run, padded, half=half, union=union)
        if padded.shape == x.shape:
            return found
        found = found.reshape(len(x), -1, padded.shape[1])[..., :n]
        return found.reshape(len(x), -1)

    def finish(self) -> Array:
        """int32 [1]: the error word behind all calls, filled up so that the next execution may
        begin: sums to a multiple of 3, gathers so that no half is used twice in succession.
        """
        e = self.memory.exchange
        while self.count(SUM) % SLOTS:
            self.all_reduce(jnp.zeros((e.rows, e.width), jnp.bfloat16), self.memory.axes)
        ends = {*self.kinds[:1], *self.kinds[-1:]}
        if ends == {GATHER} and self.count(GATHER) % HALVES:
            self.gather(jnp.zeros((1, VECTOR_BYTES // 4), jnp.int32), self.memory.axes)
        after = self.table if self.last is None else self.last
        report = build_report(self.memory.kernels)
        return report(self.table, after, self.memory.axes, exchange=e)

    def _check_axes(self, axes: Axes) -> None:
        if axes != self.memory.axes:
            raise ValueError(f"{axes=} must be {self.memory.axes}, which the peer memory sums over")

    def _sum(self, run: Callable, *arrays: Array, **options: float) -> Any:
        slot = self.count(SUM) % SLOTS
        self.kinds.append(SUM)
        return self._run(run, *arrays, slot=slot, **options)

    def _run(self, run: Callable, *arrays: Array, **options: Any) -> Any:
        """The call behind the one before it, whatever XLA knows of their order."""
        after = arrays[0] if self.last is None else self.last
        axes, exchange = self.memory.axes, self.memory.exchange
        result = run(*arrays, self.table, after, axes, exchange=exchange, **options)
        self.last = result[-1] if isinstance(result, tuple) else result
        return result


_TRACED: ContextVar[PeerCalls | None] = ContextVar("peer calls of the program traced", default=None)


def traced_calls() -> PeerCalls:
    """Those of the program that is being traced; ValueError if it has no peer memory."""
    calls = _TRACED.get()
    if calls is None:
        raise ValueError("peer-to-peer calls must be traced inside PeerMemory.calls")
    return calls


def calls_over(axes: Axes) -> PeerCalls | None:
    """Those of the program that is being traced if it has peer memory over just these axes."""
    calls = _TRACED.get()
    return calls if calls is not None and calls.memory.axes == axes else None


def check_devices(mesh: Mesh, kernels: str) -> None:
    """UserError if another process holds some of the devices, or they lack the kernels."""
    foreign = {d.process_index for d in mesh.devices.flat} - {jax.process_index()}
    if foreign:
        raise UserError(
            f"peer-to-peer calls need one process for all devices of a mesh, process"
            f" {min(foreign)} holds some of these"
        )
    try:
        build_all_reduce(kernels)
    except ValueError as error:
        raise UserError(str(error)) from error


def groups(mesh: Mesh, axes: Axes) -> list[list[Any]]:
    """Devices that reduce with each other, each in the order of its rank, the first axis
    outermost.
    """
    others = [axis for axis in mesh.axis_names if axis not in axes]
    order = [mesh.axis_names.index(axis) for axis in (*others, *axes)]
    ranks = prod(mesh.shape[axis] for axis in axes)
    return mesh.devices.transpose(order).reshape(-1, ranks).tolist()


def _spread(mesh: Mesh, rows: list[np.ndarray]) -> Array:
    """One row [1, K] for each device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    parts = [jax.device_put(r, d) for r, d in zip(rows, mesh.devices.flat, strict=True)]
    shape = (len(rows), *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
