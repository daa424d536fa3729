"""Where a measured step finds its Engram rows (ARCHITECTURE 9.4).

hbm: in tables on the device, no row is fetched. With tables on the host, memory-mapped files of
random rows, the engine's own code hashes a step's tokens, gathers their rows once each, copies them
to the device and hands them to the program as an input. A program begins when its inputs are there,
so rows are fetched beside the step before it or beside nothing:

host-ahead, with prefetch: the rows of a step are fetched while the step before it runs. So the
engine runs prompts, whose tokens are known; of a prompt by itself the first chunk has nothing to be
fetched beside. A decoding step that is measured so has its tokens a step earlier than the engine
could.

host-late, without prefetch: a step is waited for and its tokens are read, then the rows of the next
are fetched, then that begins. So the engine decodes and verifies, since the tokens come from the
step before.

Tokens are uniform and others in each step, whatever the model has sampled: random weights repeat
themselves.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.engram_hash import HashConstants
from dsv41_jax.engram_host import HostTables
from dsv41_jax.engram_staging import Staged
from dsv41_jax.errors import UserError
from pallas_kernels.quant import Fp8Rows
from serving.bench.forward_cases import Case, Dispatch
from serving.bench.forward_inputs import layer_rows
from serving.bench.forward_model import measured_model
from serving.bench.forward_programs import SharedPrograms
from serving.bench.forward_steps import Steps
from serving.request import Request
from serving.sequence import Sequence
from serving.table_rows import ENCODERS, TableRows

HBM, AHEAD, LATE = "hbm", "host-ahead", "host-late"
ENGRAM_MODES = (HBM, AHEAD, LATE)
WITHOUT_TABLES = ("draft", "replay")  # phases whose programs have no Engram layer
MOST_BYTES = 16 << 30
_DRAWS = 16  # of tokens, which take turns
_PIECE = 1 << 16  # random rows of a table, which then repeat
_PAGE_BYTES = 4096
_SCALE = 120  # 2^-7: the codes become numbers of order one


def without_tables(cfg: Config) -> Config:
    """The model with Engram tables of a few rows, in whose place programs take fetched ones."""
    return measured_model(cfg, "all", 1)


def check_host_tables(cfg: Config) -> None:
    """UserError if the model has no tables, or files of them would be too large."""
    if not cfg.engram_layer_ids:
        raise UserError("--engram: none of the layers has a table that could be on the host")
    size, free = table_bytes(cfg), shutil.disk_usage(gettempdir()).free
    if size > min(MOST_BYTES, free):
        most = f"{MOST_BYTES / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {gettempdir()}"
        raise UserError(f"--engram-rows: files of {size / 1e9:.1f} GB must be at most {most}")


def table_bytes(cfg: Config) -> int:
    """Of the tables on the host."""
    return sum(cfg.engram_num_embeddings) * (cfg.engram_head_dim + cfg.engram_head_dim // 32)


@contextmanager
def host_tables(cfg: Config) -> Iterator[HostTables]:
    """Tables of a model in a temporary directory, each page of them in memory."""
    with TemporaryDirectory(prefix="engram-") as folder:
        sizes = zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True)
        tables = {
            layer: _table(Path(folder) / str(layer), rows, cfg.engram_head_dim)
            for layer, rows in sizes
        }
        constants = {layer: HashConstants.of(cfg, layer) for layer in tables}
        ids = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
        host = HostTables(tables, constants, ids, int(ids[cfg.engram_pad_token_id]))
        try:
            yield host
        finally:
            host.close()


def _table(path: Path, rows: int, width: int) -> Fp8Rows:
    path.mkdir()
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 0xFE, (min(rows, _PIECE), width), np.uint8)
    codes[codes >= 0x7F] += 1  # 0x7F and 0xFF are no numbers
    scales = np.full((len(codes), width // 32), _SCALE, np.uint8)
    mapped = _mapped(path / "codes", codes, rows), _mapped(path / "scales", scales, rows)
    return Fp8Rows(mapped[0].view(ml_dtypes.float8_e4m3fn), mapped[1])


def _mapped(path: Path, piece: np.ndarray, rows: int) -> np.ndarray:
    """A file of so many rows that repeat a piece, mapped; each of its pages has been read."""
    with path.open("wb") as file:
        for start in range(0, rows, len(piece)):
            file.write(piece[: rows - start].data)
    plane = np.memmap(path, np.uint8, "r", shape=(rows, piece.shape[1]))
    plane.reshape(-1)[::_PAGE_BYTES].max()
    return plane


@dataclass(frozen=True)
class Fetching:
    """How the rows of measured steps come from the host."""

    tables: TableRows
    late: bool

    @classmethod
    def of(cls, host: HostTables, programs: SharedPrograms) -> "Fetching":
        lookback = programs.cfg.engram_max_ngram_size - 1
        ranks, device = programs.ranks, programs.device
        return cls(TableRows(host, ranks=ranks, lookback=lookback, device=device), late=False)

    def fetch(self, cfg: Config, dispatch: Dispatch, *, replay: bool) -> Callable | None:
        """The function () -> rows of a dispatch, new ones each time; None if it takes none."""
        if dispatch.program not in ENCODERS:
            return None
        rng, tables = np.random.default_rng(2), self.tables
        bucket, ranks = dispatch.bucket, tables.ranks
        whole = replace(bucket, requests=ranks * bucket.requests)
        lead = whole.requests, tables.lookback + 1
        if dispatch.program in ("decode", "verify"):
            draws = [
                (_sequences(rng.integers(0, cfg.vocab_size, lead)),
                 rng.integers(0, cfg.vocab_size, (whole.requests, whole.rows - 1), np.int32))
                for _ in range(_DRAWS)
            ]  # fmt: skip
            return _Turns(draws, lambda draw: tables.of_newest(whole, *draw))
        one = layer_rows(cfg, dispatch, replay)
        every = jax.tree.map(lambda leaf: np.concatenate([leaf] * ranks), one)
        shape = every.tokens.shape
        prompts = [
            replace(every, tokens=rng.integers(0, cfg.vocab_size, shape, np.int32))
            for _ in range(_DRAWS)
        ]
        return _Turns(prompts, tables.of)

    def close(self) -> None:
        self.tables.close()


def _sequences(tokens: np.ndarray) -> list[Sequence]:
    """Requests whose newest tokens are a row each."""
    return [Sequence.of(Request(tuple(row), 1), i) for i, row in enumerate(tokens.tolist())]


@dataclass
class _Turns:
    draws: list[Any]
    run: Callable[[Any], tuple[Staged, ...]]
    calls: int = 0

    def __call__(self) -> tuple[Staged, ...]:
        self.calls += 1
        return self.run(self.draws[self.calls % len(self.draws)])


@dataclass
class HostSteps(Steps):
    """``Steps`` that fetch the rows of their dispatches before each."""

    fetches: list[Callable | None]
    late: bool
    fetched: tuple[Staged, ...] = ()

    def __call__(self) -> Any:
        out = super().__call__()
        if self.late:
            for leaf in jax.tree.leaves(getattr(out, "sampled", out)):
                np.asarray(leaf)  # as the engine reads tokens
        return out

    def rows(self, number: int) -> tuple[Staged, ...]:
        fetch = self.fetches[number]
        if fetch is None:
            return ()
        if self.late and number:
            jax.block_until_ready(self.cache)
        self.fetched = fetch()
        return self.fetched

    @property
    def lasting(self) -> Any:
        return self.cache, self.fetched

    def fetch_all(self) -> tuple[Staged, ...]:
        """The rows of every dispatch and nothing else, one after the other; gives the last."""
        for number in range(len(self.fetches)):
            self.rows(number)
        return self.fetched


def reads_tables(case: Case) -> bool:
    """Whether a case runs Engram layers."""
    return case.phase not in WITHOUT_TABLES
