"""Engram tables that stay in host memory or on disk: rows are gathered by threads (ARCHITECTURE
9.3 and 9.4).

Which rows a forward needs follows from its token ids alone, so they can be fetched as soon as those
are known. Columns own disjoint parts of a table; within each, a row is fetched once however often
it is asked for, in the order in which the rows lie.
"""

import mmap
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from dsv41_jax.engram_hash import HashConstants, hash_rows_host
from dsv41_jax.model import Model
from dsv41_jax.rows import Rows
from pallas_kernels.quant import Fp8Rows

PIECE = 1024  # rows that a thread copies at a time, and as many ids are the work of one thread
ADVICE = ("MADV_RANDOM", "MADV_HUGEPAGE")


def default_threads() -> int:
    return min(16, os.cpu_count() or 1)


def advise(array: np.ndarray) -> tuple[str, ...]:
    """Tell the system that a mapped array is read at random and may lie in huge pages; returns what
    it took, nothing for an array that is not mapped.
    """
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap):
        return ()
    begin = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    taken = []
    for name in ADVICE:
        option = getattr(mmap, name, None)
        try:
            if option is not None:
                base.madvise(option, start, begin + array.nbytes - start)
                taken.append(name)
        except OSError:  # this kernel, or this file system, has no such pages
            continue
    return tuple(taken)


@dataclass(frozen=True)
class RowBuffers:
    """Where gathered rows go: codes uint8 [U, N], scales uint8 [U, N/32], places int32 [B, T, C]: U
    is B*T*C, all rows different.
    """

    codes: np.ndarray
    scales: np.ndarray
    places: np.ndarray

    @classmethod
    def empty(cls, requests: int, rows: int, columns: int, width: int) -> "RowBuffers":
        most = requests * rows * columns
        return cls(
            np.zeros((most, width), np.uint8),
            np.zeros((most, width // 32), np.uint8),
            np.zeros((requests, rows, columns), np.int32),
        )

    def part(self, index: int, count: int) -> "RowBuffers":
        """A view of one of ``count`` equal parts, in which places count from 0."""

        def cut(plane: np.ndarray) -> np.ndarray:
            size = len(plane) // count
            return plane[index * size : (index + 1) * size]

        return RowBuffers(cut(self.codes), cut(self.scales), cut(self.places))


class HostTable:
    """One table: NumPy arrays, mapped or not. ``advice``: what the system took of ``ADVICE``."""

    def __init__(self, table: Fp8Rows):
        self.codes = np.asarray(table.codes).view(np.uint8)
        self.scales = np.asarray(table.scales)
        self.advice = advise(self.codes), advise(self.scales)

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    def gather(self, ids: np.ndarray, out: RowBuffers, pool: Executor) -> int:
        """Fetch the rows of ids int32 [B, T, C] once each; returns how many different ones they
        are. ValueError for an id outside the table.
        """
        if ids.shape != out.places.shape:
            raise ValueError(f"{ids.shape=} must be {out.places.shape=}")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.rows:
            raise ValueError(f"row ids {ids.min()} to {ids.max()} must be below {self.rows=}")
        few = ids.size <= PIECE  # not worth a hand-over to other threads
        run = map if few else pool.map
        groups = ids.reshape(1, -1) if few else ids.reshape(-1, ids.shape[-1]).T
        places = out.places.reshape(groups.shape[::-1])
        distinct, count = [np.zeros(0, np.int32)], 0
        for group, (found, inverse) in enumerate(run(_distinct, groups)):
            places[:, group] = count + inverse
            distinct.append(found)
            count += len(found)
        wanted = np.concatenate(distinct)

        def fetch(start: int) -> None:
            piece = slice(start, start + PIECE)
            for plane, rows in ((self.codes, out.codes), (self.scales, out.scales)):
                np.take(plane, wanted[piece], axis=0, out=rows[:count][piece], mode="clip")

        list(run(fetch, range(0, count, PIECE)))
        return count


def _distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(ids, return_inverse=True)


class HostTables:
    """The tables of a model by layer, with what turns tokens into their rows.

    token_map int32 [V], pad: as of ``hash_rows_host``. threads: that gather.
    """

    def __init__(
        self,
        tables: Mapping[int, Fp8Rows],
        constants: Mapping[int, HashConstants],
        token_map: np.ndarray,
        pad: int,
        *,
        threads: int | None = None,
    ):
        for layer, table in tables.items():
            if constants[layer].rows != table.shape[0]:
                raise ValueError(f"{layer=}: {table.shape=} must have {constants[layer].rows} rows")
        self.tables = {layer: HostTable(tables[layer]) for layer in sorted(tables)}
        self.constants, self.token_map, self.pad = dict(constants), token_map, pad
        self.pool = ThreadPoolExecutor(threads or default_threads(), "engram")

    @staticmethod
    def held_by(model: Model) -> bool:
        """Whether a model has tables on the host."""
        tables = [block.engram.embed() for block in model.layers if block.layer.engram]
        return any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tables))

    @classmethod
    def of(cls, model: Model, *, threads: int | None = None) -> "HostTables":
        """The tables of a model that was loaded with ``engram="host"``; ValueError if one is
        elsewhere.
        """
        modules = {block.layer.index: block.engram for block in model.layers if block.layer.engram}
        tables = {layer: module.embed() for layer, module in modules.items()}
        for layer, table in tables.items():
            if not isinstance(table, Fp8Rows) or not isinstance(table.codes, np.ndarray):
                raise ValueError(f"{layer=}: the Engram table must be on the host")
        token_map = np.asarray(model.token_map[...])
        return cls(
            tables,
            {layer: module.constants for layer, module in modules.items()},
            token_map,
            int(token_map[model.cfg.engram_pad_token_id]),
            threads=threads,
        )

    def columns(self, layer: int) -> int:
        return len(self.constants[layer].offsets)

    def row_ids(self, layer: int, rows: Rows) -> np.ndarray:
        """Table rows int32 [B, T, C] of rows whose leaves are host arrays; places beyond the live
        rows get those of dead tokens.
        """
        dead = np.arange(rows.tokens.shape[1]) >= np.asarray(rows.length)[:, None]
        return hash_rows_host(
            np.asarray(rows.tokens),
            np.asarray(rows.image) | dead,
            self.constants[layer],
            self.token_map,
            self.pad,
            np.asarray(rows.previous),
        )

    def gather(self, layer: int, rows: Rows, out: RowBuffers) -> int:
        """The rows of a forward to ``out``; returns how many different ones they are."""
        return self.tables[layer].gather(self.row_ids(layer, rows), out, self.pool)

    def close(self) -> None:
        self.pool.shutdown()
