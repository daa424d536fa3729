"""Compress-and-store's own PTX on a host machine (``ptx_machine``), through the kernel's entry,
against the reference: every stored byte of pools and rings, whether written or not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.compress import kernel_sm90, op, ref
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Projected, Window
from pallas_kernels.compress.store_shape import LATENTS, Job
from pallas_kernels.quant.storage import KeyRows, LatentRows, PlainRows, WindowRows
from pallas_kernels.rotate import rotate
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict

EPS = 1e-20
BF16, I32, F32 = ml_dtypes.bfloat16, np.int32, np.float32
UNITS, UNIT, PAGES = 5, 4, 3  # pages of the pools, entries of each, pages of a request
SLOTS, RING = 3, 8
PLACES = 7
FAR = np.iinfo(I32).max
ref_latents, ref_keys, ref_window = (
    jax.jit(f, static_argnames="eps", compiler_options={"xla_allow_excess_precision": False})
    for f in (ref.store_latents, ref.store_keys, ref.store_window)
)


def on_host(jobs: tuple[Job, ...], machine: Callable = Cluster) -> Callable:
    """``kernel_sm90.launcher`` on the host; a reference is written back after all blocks."""
    lines = kernel_sm90.program(jobs)

    def run(*operands):
        memory = Guarded(1 << 21)
        arrays = [np.asarray(x[...]) for x in operands]
        arrays += [np.zeros(out.shape, out.dtype) for out in kernel_sm90.out_type(jobs)]
        at = [memory.place(x) for x in arrays]
        for block in reversed(range(sum(job.blocks for job in jobs))):  # the last rows first
            options = {"threads": 128, "shared": 16, "operands": lambda _, b=block: [*at, b]}
            machine(lines, memory, **options).run()
        first = 0
        for job in jobs:
            for i in range(len(job.inputs), len(job.names)):
                if (j := first + i) < len(operands):
                    operands[j][...] = jnp.asarray(memory.read(at[j], arrays[j]))
            first += len(job.names)
        return (jnp.asarray(memory.read(at[-1], arrays[-1])),) if len(at) > len(operands) else ()

    return run


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(kernel_sm90, "launcher", on_host)


def words(rng, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.integers(-(2**31), 2**31, shape), I32)


def values(rng, *shape: int) -> np.ndarray:
    """Small whole numbers: sums of their squares are exact in any order."""
    return rng.integers(-12, 13, shape).astype(F32)


def angles(rng, *lead: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    cos, sin = rng.integers(-4, 5, (2, *lead, 32)) / 4
    return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)


def weight(rng, width: int) -> jnp.ndarray:
    return jnp.asarray(rng.standard_normal(width) + 1, jnp.bfloat16)


def chunk_of(starts: list[int], lengths: list[int]) -> Chunk:
    return Chunk(jnp.asarray(starts, I32), jnp.asarray(lengths, I32))


def source(rng, ratio: int, lengths: list[int], places: int) -> Pairs | Projected:
    """Rows that are not live hold NaN and 1e30; gates leave nothing to round."""
    x = values(rng, 2, len(lengths), places, 512)
    g = rng.choice([0, 200, -200], x.shape[1:]).astype(F32)
    for b, n in enumerate(lengths):
        x[:, b, n:], g[b, n:] = 1e30, np.nan
    if ratio == 1:
        return Projected(jnp.asarray(x[0], jnp.bfloat16))
    before = values(rng, 2, len(lengths), 512)
    u, before_u = jnp.asarray(2 * x[0]), jnp.asarray(2 * before[0])
    return Pairs(u, jnp.asarray(g), before_u, jnp.asarray(200 * np.sign(before[1])))


def latents_of(rng, ratio: int, lengths: list[int], places: int) -> Latents:
    at = angles(rng, len(lengths), -(-places // ratio))
    pool = LatentRows(words(rng, UNITS, UNIT, 72))
    return Latents(source(rng, ratio, lengths, places), weight(rng, 512), *at, pool)


def keys_of(rng, ratio: int, requests: int, places: int) -> Keys:
    groups = -(-places // ratio)
    pool = KeyRows(words(rng, UNITS, UNIT, 16), words(rng, UNITS, UNIT, 1))
    x = jnp.asarray(values(rng, requests, groups, 128), jnp.bfloat16)
    return Keys(x, weight(rng, 128), *angles(rng, requests, groups), pool, places, ratio)


def window_of(rng, requests: int, places: int, slots: list[int]) -> Window:
    x = jnp.asarray(values(rng, requests, places, 512), jnp.bfloat16)
    ring = WindowRows(words(rng, SLOTS, RING, 132))
    at, tags = angles(rng, requests, places), jnp.full((SLOTS, RING), -1, I32)
    return Window(x, weight(rng, 512), *at, ring, tags, jnp.asarray(slots, I32))


def paged_of(tables: list[list[int]], write_from: list[int]) -> Paged:
    return Paged(jnp.asarray(tables, I32), jnp.asarray(write_from, I32))


def equal(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# starts, lengths, page tables, write_from. A page of a hit is not written below write_from.
STEPS = {
    "decode": ([3, 6], [1, 1], [[3, 1, -1], [4, 2, -1]], [0, 0]),
    "replay": ([2, 0], [6, 3], [[0, 3, 1], [4, -1, -1]], [6, 2]),
    "odd": ([1, 5], [7, 4], [[3, 1, 4], [-1, 0, 2]], [0, 9]),
    "bad pages": ([1, 0], [7, 7], [[-1, FAR, UNITS], [1 << 30, -FAR, 9]], [0, 0]),
    "beyond the table": ([7, 22], [7, 7], [[1, 3, 4], [0, 2, 0]], [0, 0]),
}


def store_and_compare(rng, ratio: int, places: int, starts, lengths, tables, write_from) -> None:
    chunk, paged = chunk_of(starts, lengths), paged_of(tables, write_from)
    job = latents_of(rng, ratio, lengths, places)
    latent, pool = kernel_sm90.store_latents(chunk, paged, job, eps=EPS)
    want, want_pool = ref_latents(chunk, paged, job, eps=EPS)
    live = np.asarray(ref.closing_rows(chunk.start, places, ratio)) < np.array(lengths)[:, None]
    equal([np.asarray(latent)[live], pool.words], [np.asarray(want)[live], want_pool.words])
    keys = keys_of(rng, ratio, len(starts), places)
    window = window_of(rng, len(starts), places, list(range(len(starts))))
    compare_rows(chunk, paged, keys, window)


def compare_rows(chunk: Chunk, paged: Paged, keys: Keys, window: Window) -> None:
    _, ring, tags, pool = kernel_sm90.store_rows(
        chunk, window=window, paged=paged, keys=keys, eps=EPS
    )
    want_pool = ref_keys(chunk, paged, keys, eps=EPS)
    _, want_ring, want_tags = ref_window(chunk, window, eps=EPS)
    assert pool is not None
    equal([pool.codes, pool.scales], [want_pool.codes, want_pool.scales])
    equal([ring.words, tags], [want_ring.words, want_tags])


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_pools_hold_the_reference_bytes(step, ratio, rng):
    store_and_compare(rng, ratio, PLACES, *STEPS[step])


@pytest.mark.parametrize("start", [3, 4])
def test_one_row_closes_a_group_or_not(start, rng):
    store_and_compare(rng, 2, 1, [start, 0], [1, 0], [[4, 1, -1], [0, 0, 0]], [0, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_warps_in_any_order(seed, rng, monkeypatch):
    strict = partial(on_host, machine=partial(Strict, seed=seed))
    monkeypatch.setattr(kernel_sm90, "launcher", strict)
    store_and_compare(rng, 2, PLACES, *STEPS["replay"])


def test_a_step_leaves_other_pages_alone(rng):
    """What the cases above rest on: rows that are not written, and page 0 of a hit, stay."""
    starts, lengths, tables, write_from = STEPS["replay"]
    job = latents_of(rng, 1, lengths, PLACES)
    _, pool = kernel_sm90.store_latents(
        chunk_of(starts, lengths), paged_of(tables, write_from), job, eps=EPS
    )
    changed = (np.asarray(pool.words) != np.asarray(job.pool.words)).any(-1)
    assert np.argwhere(changed).tolist() == [[3, 2], [3, 3], [4, 2]]


@pytest.mark.parametrize(
    "starts,lengths,places,slots",
    [
        ([5, 6], [13, 2], 13, [1, 0]),
        ([7, 14], [13, 3], 13, [2, 0]),
        ([0, 3], [4, 4], PLACES, [-1, SLOTS]),
        ([0, 1], [7, 7], PLACES, [FAR, 1]),
    ],
)
def test_rings_keep_the_last_rows(starts, lengths, places, slots, rng):
    chunk, window = chunk_of(starts, lengths), window_of(rng, len(starts), places, slots)
    window = replace(window, emit=places > RING)
    rows, ring, tags, pool = kernel_sm90.store_rows(chunk, window=window, eps=EPS)
    assert pool is None and (rows is None) != window.emit
    want, want_ring, want_tags = ref_window(chunk, window, eps=EPS)
    equal([ring.words, tags], [want_ring.words, want_tags])
    if rows is not None:
        equal([rows.words], [want.words])


def grid(rng, width: int, group: int) -> np.ndarray:
    """bf16 values: ties of the FP4 grid, all magnitudes, groups of zeros and of tiny values."""
    ties = rng.integers(-24, 25, width) * 2.0 ** rng.integers(-20, 4, width // group).repeat(group)
    ties *= rng.choice([1, 1.125, 1.5, 1.875], width // group).repeat(group)
    far = rng.standard_normal(width) * 2.0 ** rng.integers(-30, 30, width)
    near = rng.standard_normal(width) * 2.0 ** rng.integers(-30, 12, width // group).repeat(group)
    kind = rng.integers(0, 4, width // group).repeat(group)
    tiny = rng.choice([0.0, -0.0, 1e-37, -1e-37], width)  # XLA flushes subnormal ones on a CPU
    return np.choose(kind, [ties, far, near, tiny]).astype(BF16)


@pytest.mark.parametrize("seed", range(4))
def test_codes_and_scales_of_any_value(seed, rng):
    """A row of ones is its own norm, so that the weight is what is rounded."""
    one = jnp.ones((2, PLACES, 32), jnp.float32)
    chunk, paged = chunk_of([0, 3], [1, 1]), paged_of([[1, -1, -1], [2, -1, -1]], [0, 0])
    x = jnp.ones((2, PLACES, 512), jnp.bfloat16).at[1].multiply(-1)
    same = {"weight": jnp.asarray(grid(rng, 512, 16)), "cos": one, "sin": 0 * one}
    job = replace(latents_of(rng, 1, [1, 1], PLACES), source=Projected(x), **same)
    _, pool = kernel_sm90.store_latents(chunk, paged, job, eps=EPS)
    equal([pool.words], [ref_latents(chunk, paged, job, eps=EPS)[1].words])
    window = replace(window_of(rng, 2, PLACES, [0, 2]), x=x, **same)
    same["weight"] = jnp.asarray(grid(rng, 128, 32))
    compare_rows(chunk, paged, replace(keys_of(rng, 1, 2, PLACES), x=x[..., :128], **same), window)


def test_any_gates_and_angles(rng):
    """Sums and gates in another order: latents within a step of bf16, codes exactly theirs."""
    chunk, paged = chunk_of([1, 2], [7, 6]), paged_of([[1, 3, -1], [0, 4, -1]], [0, 0])

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(3 * rng.standard_normal(shape), jnp.float32)

    pairs = Pairs(*(draw(2, PLACES, 512) for _ in "ug"), *(draw(2, 512) for _ in "ug"))
    angle = rng.random((2, 4, 32)) * 6
    at = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    job = replace(latents_of(rng, 2, [7, 6], PLACES), source=pairs)
    job = replace(job, cos=next(at), sin=next(at))
    latent, pool = kernel_sm90.store_latents(chunk, paged, job, eps=EPS)
    want, _ = ref_latents(chunk, paged, job, eps=EPS)
    bits = [np.asarray(a).view(np.int16)[:, :3].astype(int) for a in (latent, want)]
    assert np.abs(bits[0] - bits[1]).max() <= 1 and (bits[0] != bits[1]).mean() < 0.01
    rows = jax.jit(LatentRows.encode)(rotate(latent, job.cos, job.sin)).words
    equal([pool.words[1], pool.words[0, 1:]], [rows[0], rows[1, :3]])


def test_no_rows(rng):
    chunk, paged = chunk_of([0], [0]), paged_of([[1, -1, -1]], [0])
    job = latents_of(rng, 2, [0], 0)
    latent, pool = kernel_sm90.store_latents(chunk, paged, job, eps=EPS)
    assert latent.shape == (1, 0, 512) and pool is job.pool
    window = window_of(rng, 1, 0, [0])
    assert kernel_sm90.store_rows(chunk, window=window, eps=EPS)[1] is window.ring


def test_bad_arguments_name_the_value(rng):
    chunk, paged = chunk_of([0], [1]), paged_of([[1, -1, -1]], [0])
    job, window = latents_of(rng, 1, [1], 1), window_of(rng, 1, 1, [0])

    def refused(match: str, **changed) -> None:
        with pytest.raises(ValueError, match=match):
            kernel_sm90.store_latents(chunk, paged, replace(job, **changed), eps=EPS)

    refused(r"x float32\(1, 1, 512\) must be bfloat16", source=Projected(jnp.zeros((1, 1, 512))))
    refused(r"weight float32\(512,\) must be bfloat16", weight=jnp.ones(512))
    refused(r"cos float32\(1, 2, 32\) must be float32\(1, 1, 32\)", cos=jnp.zeros((1, 2, 32)))
    small = LatentRows(jnp.zeros((2, 2, 36), jnp.int32))
    refused(r"pool int32\(2, 2, 36\) must be int32\(2, 2, 72\)", pool=small)
    refused("pool of PlainRows must be LatentRows", pool=PlainRows(jnp.zeros((2, 2, 512))))
    with pytest.raises(ValueError, match=r"slot int32\(2,\) must be int32\(1,\)"):
        kernel_sm90.store_rows(chunk, window=replace(window, slot=jnp.zeros(2, jnp.int32)), eps=EPS)
    with pytest.raises(ValueError, match=r"self.ratio=3 must be 1 or 2"):
        Job(LATENTS, 1, 1, 1, 1, ratio=3)


def test_auto_on_hopper_takes_the_reference_for_other_shapes(rng, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for name in ("store_latents", "store_rows"):
        monkeypatch.setattr(ref, name, lambda *_, **__: "ref")
        monkeypatch.setattr(kernel_sm90, name, lambda *_, **__: "kernel")
    latents, rows = op.build_latents("auto"), op.build_rows("auto")
    for ratio in (1, 2):
        job = latents_of(rng, ratio, [1], 1)
        assert latents(None, None, job, eps=EPS) == "kernel"
        assert latents(None, None, replace(job, weight=jnp.ones(512)), eps=EPS) == "ref"
        assert latents(None, None, replace(job, cos=job.cos[..., :8]), eps=EPS) == "ref"
    plain = replace(job, pool=PlainRows(jnp.zeros((1, 1, 512))))
    assert latents(None, None, plain, eps=EPS) == "ref"
    assert op.build_latents("mosaic")(None, None, plain, eps=EPS) == "kernel"  # which raises
    window, keys = window_of(rng, 1, 1, [0]), keys_of(rng, 1, 1, 1)
    narrow = replace(keys, x=keys.x[..., :64])
    assert rows(None, window=window, eps=EPS) == rows(None, window=window, keys=keys, eps=EPS)
    assert rows(None, window=window, keys=keys, eps=EPS) == "kernel"
    assert rows(None, window=window, keys=narrow, eps=EPS) == "ref"
    assert rows(None, window=replace(window, x=jnp.ones((1, 1, 512))), eps=EPS) == "ref"
