"""Donation: the cache is updated in place, never copied, and gone for the caller."""

import re

import jax
import numpy as np
import pytest

from tests.serving.support import (
    DECODE,
    EVERY_PROGRAM,
    FULL,
    NOBODY,
    PLACES,
    REPLAY,
    SHAPE,
    bucket,
    build_sampling,
    decode_batch,
    host_bits,
    poisoned,
)

HLO_TYPES = {"float32": "f32", "int32": "s32", "bfloat16": "bf16", "uint8": "u8"}
COPY = re.compile(r" = \(?(\w+\[[\d,]*\])[^=(\n]* (?:copy|copy-start)\(")
IDS = [f"{name}-{b.rows}x{b.steps}" for name, b in EVERY_PROGRAM]
NUMERICS_PROGRAMS = [
    *(
        pytest.param("float32", p, id=f"float32-{i}")
        for p, i in zip(EVERY_PROGRAM, IDS, strict=True)
    ),
    *(
        pytest.param("reference", p, id=f"reference-{p[0]}", marks=pytest.mark.slow)
        for p in (("encode", bucket(16)), REPLAY, DECODE)
    ),
]


def inputs(bench, program: tuple) -> tuple:
    """Arguments without live rows."""
    name, b = program
    if name == "decode":
        return decode_batch([NOBODY] * PLACES), build_sampling([], b)
    rows = bench.rows([], b.rows)
    return (rows,) if name == "encode" else (rows, build_sampling([], b))


def cache_shapes(cache) -> dict[str, str]:
    """Shape in HLO of every cache array -> one array of that shape."""
    return {
        f"{HLO_TYPES[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]": jax.tree_util.keystr(
            path
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
    }


def test_the_pattern_finds_copies():
    text = "  %copy.139 = s32[6,32]{1,0} copy(%p)\n %c = (f32[2,3]{1,0}, u32[]) copy-start(%q)"
    assert COPY.findall(text) == ["s32[6,32]", "f32[2,3]"]


@pytest.mark.parametrize(("numerics", "program"), NUMERICS_PROGRAMS)
def test_nothing_copies_a_cache_array(benches, numerics, program):
    bench = benches(numerics)
    shapes = cache_shapes(jax.eval_shape(bench.new_cache))
    copied = COPY.findall(bench.executable(program).as_text())
    assert sorted({f"{shape} {shapes[shape]}" for shape in copied if shape in shapes}) == []


@pytest.mark.parametrize(("numerics", "program"), NUMERICS_PROGRAMS)
def test_the_whole_cache_is_aliased(benches, numerics, program):
    bench = benches(numerics)
    cache = jax.eval_shape(bench.new_cache)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    analysis = bench.executable(program).memory_analysis()
    assert analysis.alias_size_in_bytes == nbytes


@pytest.mark.parametrize("program", EVERY_PROGRAM, ids=IDS)
def test_without_live_rows_no_bit_changes(bench, program):
    """Idle batches, warm-up: nothing is written, nothing fails (poisoned rows included)."""
    cache = poisoned(bench.new_cache())
    before = host_bits(cache)
    out = bench.call(program, cache, *inputs(bench, program))
    after = host_bits(out if program[0] == "encode" else out[0])
    assert {path for path in before if (before[path] != after[path]).any()} == set()


@pytest.mark.parametrize("program", [("encode", bucket(64)), REPLAY, FULL, DECODE])
def test_the_donated_cache_is_gone(bench, program):
    cache = bench.new_cache()
    arguments = inputs(bench, program)
    bench.call(program, cache, *arguments)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    with pytest.raises(RuntimeError, match=r"[Dd]eleted"):
        np.asarray(cache.history)
    with pytest.raises((RuntimeError, ValueError), match=r"[Dd]eleted|donated"):
        bench.programs(*program, cache, *arguments)


def test_programs_are_compiled_for_the_extent_of_the_cache(bench):
    """Capacity and array extent are one number."""
    cache = jax.eval_shape(bench.new_cache)
    assert {pool.latents.values.shape[0] for pool in cache.pools.values()} == {SHAPE.pages}
    assert {ring.tags.shape[0] for ring in cache.windows} == {SHAPE.slots}


def test_a_bucket_that_was_not_compiled_is_an_error(bench):
    with pytest.raises(KeyError):
        bench.programs("encode", bucket(33), bench.new_cache(), bench.rows([], 33))
