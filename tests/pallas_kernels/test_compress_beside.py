"""Products and stores in one launch: the program's two branches on a host machine, through the
kernel's entry, against the references.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compress import beside_sm90, op
from pallas_kernels.compress.store_shape import Job
from pallas_kernels.linear import kernel_sm90 as linear_sm90
from pallas_kernels.linear import ref as linear_ref
from pallas_kernels.linear import stream_shape
from pallas_kernels.linear.skinny_shape import Skinny
from pallas_kernels.linear.stream_shape import Stream
from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels import test_compress_kernel as stores
from tests.pallas_kernels.ptx_machine import COLLECTIVE, OPERATIONS
from tests.pallas_kernels.ptx_strict import Guarded
from tests.pallas_kernels.ptx_tensor import FIRST, Map, Mapped
from tests.pallas_kernels.test_mhc_kernel import FLOATS

BF16, EPS = jnp.bfloat16, 1e-6


@pytest.fixture(autouse=True)
def operations(monkeypatch):
    monkeypatch.setitem(COLLECTIVE, "bar", lambda *_: None)
    for name in ("rsqrt", "fma"):
        monkeypatch.setitem(OPERATIONS, name, FLOATS[name])


def branches(lines: list[str]) -> tuple[list[str], list[str]]:
    """What clusters of the product run, and what those behind them do; the machine knows no
    scopes.
    """
    opened = [i for i, line in enumerate(lines) if line == "{"]
    closed = [i for i, line in enumerate(lines) if line == "}"]
    between = lines[closed[0] + 1 : opened[1]]
    assert lines[1].endswith("@beside bra BESIDE;") and between[0] == "bra.uni DONE;"
    assert lines[closed[1] + 1 :] == ["DONE:"]
    store = [lines[0], *between[1:], *lines[opened[1] + 1 :]]
    store.remove("}")
    return lines[opened[0] + 1 : closed[0]], store


def on_host(s: Stream | Skinny, jobs: tuple[Job, ...]):
    """``beside_sm90.launcher`` on the host."""
    product, store = branches(beside_sm90.program(s, jobs))
    count = len(s.outputs)

    def run(*operands):
        memory = Guarded(1 << 21)
        arrays = [np.asarray(x[...]) for x in operands]
        outs = [np.zeros((s.rows, n), BF16) for n in s.outputs]
        at = [memory.place(x) for x in arrays]
        places = [memory.place(x) for x in outs]
        addresses = [*at[: 1 + 2 * count], *places, *at[1 + 2 * count :], 0]
        boxes = linear_sm90.boxes(s)
        maps = [Map(addresses[n], arrays[n].shape, *box) for n, *box in boxes]
        clusters = s.grid - (-sum(job.blocks for job in jobs) // s.blocks)
        for cluster in reversed(range(clusters)):
            machine = Mapped(
                product if cluster < s.grid else store,
                memory,
                threads=s.threads,
                shared=4 * s.words,
                operands=lambda _, cluster=cluster: [
                    *addresses,
                    cluster,
                    *(FIRST + n for n in range(len(maps))),
                ],
                blocks=s.blocks,
                seed=1,
                maps=maps,
            )
            for block in machine.blocks:
                block.special["%cluster_ctarank"] = np.full(block.n, block.rank, np.uint32)
            machine.run()
        first = 2 + 2 * count  # behind the norm
        for job in jobs:
            for j in range(first + len(job.inputs), first + len(job.names)):
                operands[j][...] = jnp.asarray(memory.read(at[j], arrays[j]))
            first += len(job.names)
        return [jnp.asarray(memory.read(*out)) for out in zip(places, outs, strict=True)]

    return run


def product(rng, rows: int, k: int, outputs: tuple[int, ...]) -> tuple:
    """x, the norm's weight, matrices."""
    norm, x = stores.weight(rng, k), jnp.asarray(rng.standard_normal((rows, 1, k)), BF16)
    drawn = (jnp.asarray(rng.standard_normal((n, k)), jnp.float32) for n in outputs)
    return x, norm, tuple(map(Fp8Blocks.quantize, drawn))


@pytest.mark.parametrize(
    ("k", "owns", "streamed"), [(128, False, False), (128, False, True), (1024, True, True)]
)
def test_both_are_the_references(k, owns, streamed, rng, monkeypatch):
    monkeypatch.setattr(beside_sm90, "launcher", on_host)
    if not streamed:
        monkeypatch.setattr(stream_shape, "tuned", lambda *_, **__: None)
    x, norm, weights = product(rng, 2, k, (64, 32) if owns else (64,))
    chunk = stores.chunk_of([3, 6], [1, 1])
    paged = stores.paged_of([[3, 1, -1], [4, 2, -1]], [0, 0]) if owns else None
    keys = stores.keys_of(rng, 1, 2, 1) if owns else None
    jobs = {"window": stores.window_of(rng, 2, 1, [2, 0]), "paged": paged, "keys": keys}
    options = {"eps": EPS, "row_eps": stores.EPS, "numerics": SERVING}
    got, stored = beside_sm90.linears_beside_rows(x, norm, weights, chunk, **jobs, **options)
    want = linear_ref.normed_linears(x, norm, weights, eps=EPS, numerics=SERVING)
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(values, np.float64) for values in (a, b))
        assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b)
    emitted, ring, tags, pool = stored
    _, *rows = stores.ref_window(chunk, jobs["window"], eps=stores.EPS)
    stores.equal((ring.words, tags), (rows[0].words, rows[1]))
    assert emitted is None and (pool is None) is not owns
    if pool is not None:
        other = stores.ref_keys(chunk, paged, keys, eps=stores.EPS)
        stores.equal((pool.codes, pool.scales), (other.codes, other.scales))


def test_where_the_op_takes_it(rng, monkeypatch):
    """One launch where each operation has one, else the two."""
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(beside_sm90, "linears_beside_rows", lambda *_, **__: "one")
    both = {"build_normed": "y", "build_rows": "rows"}
    monkeypatch.setattr(op.linear, "build_normed", lambda _: lambda *_, **__: both["build_normed"])
    monkeypatch.setattr(op, "build_rows", lambda _: lambda *_, **__: both["build_rows"])
    chunk, window = stores.chunk_of([3], [1]), stores.window_of(rng, 1, 1, [0])
    options = {"window": window, "eps": EPS, "row_eps": EPS}

    def taken(kernels: str, rows: int = 1, numerics=SERVING) -> object:
        arrays = product(rng, rows, 32, (32,))
        return op.build_beside(kernels)(*arrays, chunk, **options, numerics=numerics)

    assert taken("auto") == taken("mosaic") == taken("auto", 128) == "one"
    two = ("y", "rows")
    assert taken("auto", 129) == taken("reference") == taken("mosaic", 1, REFERENCE) == two
    with pytest.raises(
        ValueError, match=r"linears_beside_rows: x.shape=\(129, 1, 32\) must be few"
    ):
        monkeypatch.undo()
        run = partial(beside_sm90.linears_beside_rows, **options, numerics=SERVING)
        run(*product(rng, 129, 32, (32,)), chunk)
