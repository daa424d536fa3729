"""Time the gathering of host-resident Engram rows, alone and behind device work:
``python -m dsv41_jax.engram_bench [--rows N] [--requests B] [--table-rows N] [--threads 1,4,16]
[--directory DIR] [--work MS] [--side N] [--profile DIR] [--json FILE]``.

The table is a file of drawn bytes, mapped into memory, in the page cache unless it exceeds it;
tokens are drawn from a Zipf distribution with exponent 1.1 over 99,092 ids. Times are medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.engram_hash import HashConstants
from dsv41_jax.engram_host import HostTables, RowBuffers, default_threads
from dsv41_jax.engram_staging import Staging
from dsv41_jax.rows import Rows
from pallas_kernels.quant import Fp8Rows

LAYER, WIDTH, REPEATS = 1, 256, 5


def table_file(path: Path, rows: int) -> Fp8Rows:
    """A mapped table of drawn codes without NaN and scales of 2^-7 to 1."""
    rng = np.random.default_rng(0)
    piece = rng.integers(0, 0x7F, (1 << 16, WIDTH + WIDTH // 32)).astype(np.uint8)
    piece[:, WIDTH:] = 120 + piece[:, WIDTH:] % 8
    planes = []
    for name, columns in (("codes", slice(0, WIDTH)), ("scales", slice(WIDTH, None))):
        part = np.ascontiguousarray(piece[:, columns])
        with (path / name).open("wb") as file:
            for start in range(0, rows, len(part)):
                file.write(np.roll(part, start, 0)[: rows - start].tobytes())
        planes.append(np.memmap(path / name, np.uint8, "r").reshape(rows, -1))
    return Fp8Rows(planes[0].view(ml_dtypes.float8_e4m3fn), planes[1])


def constants_for(rows: int) -> HashConstants:
    """The release's multipliers over columns of equal parts of ``rows``."""
    cfg = Config.preset("flash")
    share, heads = rows // cfg.engram_columns, cfg.engram_n_heads
    sizes = [share] * (cfg.engram_columns - 1) + [rows - share * (cfg.engram_columns - 1)]
    primes = tuple(tuple(sizes[i : i + heads]) for i in range(0, len(sizes), heads))
    offsets = tuple(share * c for c in range(cfg.engram_columns))
    return HashConstants(HashConstants.of(cfg, LAYER).multipliers, primes, offsets)


def drawn_rows(requests: int, count: int, seed: int) -> Rows:
    weights = 1 / np.arange(1, 99_093) ** 1.1
    rng = np.random.default_rng(seed)
    tokens = rng.choice(len(weights), (requests, count), p=weights / weights.sum())
    zero = np.zeros(requests, np.int32)
    return Rows(
        tokens=tokens.astype(np.int32),
        image=np.zeros(tokens.shape, bool),
        start=zero,
        length=np.full(requests, count, np.int32),
        slot=zero,
        page_table=zero[:, None],
        floor=zero,
        decoder_floor=zero,
        write_from=zero,
        previous=np.full((requests, 3), -1, np.int32),
    )


def milliseconds(action: Callable[[int], object]) -> float:
    """Median of some repeats behind a first one; ``action`` gets their number."""
    times = []
    for i in range(1 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(action(i))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def parts(host: HostTables, forwards: list[Rows]) -> dict[str, float]:
    """Hashes, gathering with what it found, and the copy to the device, one after the other."""
    requests, count = forwards[0].tokens.shape
    out = RowBuffers.empty(requests, count, host.columns(LAYER), WIDTH)
    table = host.tables[LAYER]
    ids = [host.row_ids(LAYER, one) for one in forwards]
    gather = milliseconds(lambda i: table.gather(ids[i], out, host.pool))
    distinct = table.gather(ids[0], out, host.pool)
    planes = out.codes, out.scales, out.places
    return {
        "hash_ms": milliseconds(lambda i: host.row_ids(LAYER, forwards[i])),
        "gather_ms": gather,
        "asked": ids[0].size,
        "distinct": distinct,
        "gather_gbps": distinct * (WIDTH + WIDTH // 32) / gather / 1e6,
        "copy_ms": milliseconds(lambda i: jax.device_put(planes, jax.devices()[0])),
    }


def overlap(
    host: HostTables, forwards: list[Rows], work_ms: float, side: int, profile: Path | None
) -> dict[str, float]:
    """A step of device work (products of matrices of ``side``) that needs its rows: without rows,
    with rows fetched first, and with the next step's rows fetched meanwhile.
    """
    staging = Staging(host, *forwards[0].tokens.shape)
    matrix = jnp.ones((side, side), jnp.bfloat16)
    product = jit(lambda x, rows: x @ matrix * rows.codes[0, 0].astype(x.dtype) * 0 + x)
    none = staging.arrays[LAYER].rows
    once = milliseconds(lambda i: product(matrix, none))
    count = max(1, round(work_ms / once))

    def work(rows: Fp8Rows) -> jax.Array:
        x = matrix
        for _ in range(count):
            x = product(x, rows)
        return x

    def fetched(i: int) -> jax.Array:
        staging.start(forwards[i])
        return work(staging.take()[LAYER].rows)

    def ahead(i: int) -> jax.Array:
        done = work(staging.take()[LAYER].rows)
        staging.start(forwards[i])
        return done

    found = {"work_ms": milliseconds(lambda i: work(none)), "fetched_ms": milliseconds(fetched)}
    staging.start(forwards[0])
    with jax.profiler.trace(profile) if profile else nullcontext():
        found["ahead_ms"] = milliseconds(ahead)
    staging.take()
    staging.close()
    return found


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.engram_bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a request")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--table-rows", type=int, default=8_000_000)
    parser.add_argument("--threads", default=str(default_threads()))
    parser.add_argument("--directory", type=Path, help="for the table; default: a temporary one")
    parser.add_argument("--work", type=float, default=50, help="milliseconds of a device step")
    parser.add_argument("--side", type=int, default=4096, help="of the matrices it multiplies")
    parser.add_argument("--profile", type=Path, help="write a profile of the overlapped steps")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(argv)
    for name in ("rows", "requests", "work", "side"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} {getattr(args, name)} must be positive")
    if args.table_rows < 1 << 10:
        parser.error(f"--table-rows {args.table_rows} must be at least 1024")
    if not all(n.isdigit() and int(n) > 0 for n in args.threads.split(",")):
        parser.error(f"--threads {args.threads} must be positive numbers")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    forwards = [drawn_rows(args.requests, args.rows, seed) for seed in range(1 + REPEATS)]
    found = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        table = table_file(Path(directory), args.table_rows)
        constants = {LAYER: constants_for(args.table_rows)}
        for threads in map(int, args.threads.split(",")):
            host = HostTables({LAYER: table}, constants, np.arange(99_092), 2, threads=threads)
            row = {"threads": threads, "rows": args.rows, "requests": args.requests}
            row |= parts(host, forwards) | overlap(
                host, forwards, args.work, args.side, args.profile
            )
            print("  ".join(f"{name} {value:.5g}" for name, value in row.items()), flush=True)
            found.append(row | {"advice": host.tables[LAYER].advice})
            host.close()
    device = jax.devices()[0].device_kind
    print(f"device {device}, table {args.table_rows} rows, taken of ADVICE: {found[0]['advice']}")
    if args.json:
        args.json.write_text(json.dumps({"rows": found, "device": device}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
