"""Rows of host-resident Engram tables on their way to the device, ahead of the programs that read
them.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import ml_dtypes
from flax import nnx
from jax import Array

from dsv41_jax.compiling import jit
from dsv41_jax.engram_host import HostTables, RowBuffers
from dsv41_jax.rows import Rows
from pallas_kernels.engram.staged import StagedRows
from pallas_kernels.quant import Fp8Rows

AHEAD = 2  # forwards whose rows may be on their way

Staged = dict[int, StagedRows]


class Staging:
    """The rows of a program of B requests of T rows, for each layer that has a table.

    ``start(rows)`` begins to gather and copy the rows of a forward, ``take()`` gives those of the
    oldest forward started; in between other programs may run. The arrays of a ``take`` are good
    until the next one and keep their addresses, so that a recorded program need not be recorded
    again. device: where they lie (also a sharding), by default the first device. ranks: data ranks
    that have an equal part of the requests each, and of the rows, in which their places count.
    """

    def __init__(
        self, host: HostTables, requests: int, rows: int, *, ranks: int = 1, device: Any = None
    ):
        self.host, self.ranks, self.device = host, ranks, device or jax.devices()[0]
        self.shape = requests, rows
        self._slots = [self._buffers() for _ in range(AHEAD)]
        self._free: list[Array | None] = [None] * AHEAD
        self._pending: deque[tuple[int, Future[Staged]]] = deque()
        self._started = 0
        self._worker = ThreadPoolExecutor(1, "engram-staging")
        # A copy, since arrays on a CPU may share the buffers' memory.
        copied = jit(partial(jax.tree.map, lambda a: a.copy()))
        self.arrays: Staged = jax.block_until_ready(copied(self._on_device(0)))
        self._into = jit(_into, donate=(0,))

    def start(self, rows: Rows) -> None:
        """Begin to fetch the rows of a forward; leaves of ``rows`` are host arrays. ValueError if
        its shape differs, RuntimeError if ``AHEAD`` forwards have not been taken yet.
        """
        if rows.tokens.shape != self.shape:
            raise ValueError(f"{rows.tokens.shape=} must be {self.shape=}")
        if len(self._pending) == AHEAD:
            raise RuntimeError(f"{AHEAD} forwards are on their way; take one first")
        slot = self._started % AHEAD
        self._started += 1
        self._pending.append((slot, self._worker.submit(self._fetch, slot, rows)))

    def take(self) -> Staged:
        """Rows by layer of the oldest forward started; raises what its fetching raised."""
        if not self._pending:
            raise RuntimeError("no forward was started")
        slot, fetched = self._pending.popleft()
        self.arrays, self._free[slot] = self._into(self.arrays, fetched.result())
        return self.arrays

    def close(self) -> None:
        self._worker.shutdown()

    def _buffers(self) -> dict[int, RowBuffers]:
        return {
            layer: RowBuffers.empty(*self.shape, self.host.columns(layer), table.width)
            for layer, table in self.host.tables.items()
        }

    def _fetch(self, slot: int, rows: Rows) -> Staged:
        """On the worker: wait until the buffers' last content has arrived, then fill them."""
        if self._free[slot] is not None:
            jax.block_until_ready(self._free[slot])
        size = self.shape[0] // self.ranks
        for rank in range(self.ranks):
            own = jax.tree.map(lambda leaf, at=rank * size: leaf[at : at + size], rows)
            for layer, buffers in self._slots[slot].items():
                self.host.gather(layer, own, buffers.part(rank, self.ranks))
        return self._on_device(slot)

    def _on_device(self, slot: int) -> Staged:
        staged = {layer: _staged(buffers) for layer, buffers in self._slots[slot].items()}
        return jax.device_put(staged, self.device)


class StagedParameters:
    """Parameters of a model whose Engram tables are what ``staging`` took last; all others are
    those of ``params``.
    """

    def __init__(self, params: nnx.State, staging: Staging):
        self.staging = staging
        self.params = with_tables(params, staging.arrays)
        flat = dict(nnx.to_flat_state(self.params))
        self._leaves = {layer: flat[table_path(layer)] for layer in staging.host.tables}

    def take(self) -> nnx.State:
        """The parameters for the oldest forward that ``staging`` has started."""
        staged = self.staging.take()
        for layer, leaf in self._leaves.items():
            leaf.set_value(staged[layer])
        return self.params


def table_path(layer: int) -> tuple[str | int, ...]:
    """Of a layer's table among the parameters of a model."""
    return "layers", layer, "engram", "embed", "weight"


def with_tables(params: nnx.State, tables: Mapping[int, Any]) -> nnx.State:
    """The parameters with other values in place of the Engram tables of some layers."""
    copied = jax.tree.map(lambda leaf: leaf, params)
    flat = dict(nnx.to_flat_state(copied))
    for layer, table in tables.items():
        flat[table_path(layer)].set_value(table)
    return copied


def blank_rows(host: HostTables, requests: int, rows: int) -> Staged:
    """Host arrays of the shapes that rows of such a forward have."""
    return {
        layer: _staged(RowBuffers.empty(requests, rows, host.columns(layer), table.width))
        for layer, table in host.tables.items()
    }


def _staged(buffers: RowBuffers) -> StagedRows:
    codes: Any = buffers.codes.view(ml_dtypes.float8_e4m3fn)
    scales: Any = buffers.scales
    places: Any = buffers.places
    return StagedRows(Fp8Rows(codes, scales), places)


def _into(old: Staged, new: Staged) -> tuple[Staged, Array]:
    """The new values in the place of the old, and a number that is there once they are."""
    copied = jax.tree.map(lambda a, b: a.at[:].set(b), old, new)
    (first, *_) = copied.values()
    return copied, first.places.ravel()[:1]
