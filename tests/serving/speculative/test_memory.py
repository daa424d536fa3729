"""The programs of speculation update the cache in place, or do not touch it."""

import jax

from tests.serving.speculative.support import LENGTH, SLOTS
from tests.serving.test_programs_memory import COPY, cache_shapes


def compiled(engine, name: str, rows: int):
    executables = engine.executor.programs.executables
    [found] = [e for (n, bucket), e in executables.items() if (n, bucket.rows) == (name, rows)]
    return found


def test_verify_updates_the_cache_in_place(engine):
    cache = jax.eval_shape(engine.executor.programs.new_cache)
    shapes = cache_shapes(cache)
    del shapes[f"s32[{SLOTS}]"]  # a number a slot: sampled tokens have the same shape
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    for rows in (1, 1 + LENGTH):
        verify = compiled(engine, "verify", rows)
        assert verify.memory_analysis().alias_size_in_bytes == nbytes
        copied = COPY.findall(verify.as_text())
        assert sorted({shapes[shape] for shape in copied if shape in shapes}) == []


def test_draft_leaves_the_cache_alone(engine):
    draft = compiled(engine, "draft", LENGTH)
    assert draft.memory_analysis().alias_size_in_bytes == 0
    shapes = cache_shapes(jax.eval_shape(engine.executor.programs.new_cache))
    assert [shape for shape in COPY.findall(draft.as_text()) if shape in shapes] == []
    assert {leaf.shape for leaf in jax.tree.leaves(draft.out_info)} == {(SLOTS, LENGTH)}
