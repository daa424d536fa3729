"""Sampling compiles for an H200 into one command buffer, whatever its requests may ask for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax.compiling import COMPILER_OPTIONS
from serving.acceptance import accept
from serving.batch import neutral_sampling
from serving.logit_rules import counted
from serving.sampler import sample
from tests.h200.test_compile_forward import thunks
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

BATCH, SLOTS, VOCAB, DRAFTS = 4, 8, 129280, 2


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_one_command_buffer(drafts, tmp_path: Path):
    """Rules, filters and alternatives included; the table of counts is updated in place."""

    def run(counts, logits, sampling, position, slot, ids):
        given = logits, sampling, position
        options = {"logprobs": 20, "counts": lambda: counts[slot]}
        if drafts:
            sampled, _ = accept(*given, ids, position, **options)
            token = sampled.token[:, 0]
        else:
            sampled = sample(*given, **options)
            token = sampled.token
        return counted(counts, slot, token, token >= 0), sampled

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    sampling = jax.tree.map(
        lambda leaf: shape(leaf.dtype, *leaf.shape), neutral_sampling(BATCH, 8, 300, VOCAB)
    )
    rows = (BATCH, 1 + drafts) if drafts else (BATCH,)
    compiled = compile_for_h200(
        run,
        shape(jnp.int32, SLOTS, VOCAB),
        shape(jnp.float32, *rows, VOCAB),
        sampling,
        shape(jnp.int32, BATCH),
        shape(jnp.int32, BATCH),
        shape(jnp.int32, BATCH, drafts),
        donate=(0,),
        options={**COMPILER_OPTIONS, "xla_dump_to": str(tmp_path)},
    )
    outermost, launched = thunks(tmp_path)
    assert outermost == ["kCommandBuffer"]
    assert launched.count("kConditional") == 2
    assert len(launched) < 40
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and memory.alias_size_in_bytes == SLOTS * VOCAB * 4
    copies = [line for line in (text or "").splitlines() if " copy(" in line]
    assert [line for line in copies if f"s32[{SLOTS},{VOCAB}]" in line] == []
