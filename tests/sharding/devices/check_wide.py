"""A random model whose groups, expert columns and experts all divide by eight, as the release's do,
against one device: in float32, and with packed weights and caches in float32 arithmetic, where only
a code that sits on an edge may turn.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.checkpoint.random_model import RandomModel
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.config import Config
from pallas_kernels.numerics import FLOAT32, Numerics
from serving.batch import Segment, build_rows
from sharding.place import BY_RANK
from tests.compare import cosines
from tests.conftest import GOLDENS
from tests.sharding.devices.support import BUCKET, PAGES, PLACES, WIDTH, Placed
from tests.tolerances import E2E_COSINE_MEAN, SHARDED_ABS

pytestmark = pytest.mark.slow

PACKED = Numerics("packed", FLOAT32.dtype, False, True, False)

WIDE = replace(
    Config.preset("tiny"),
    o_groups=8,
    o_lora_rank=32,
    moe_intermediate_size=256,
    n_routed_experts=16,
    num_experts_per_tok=4,
    dspark_n_routed_experts=8,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tmp_path_factory.mktemp("wide") / "checkpoint"
    tokenizer = GOLDENS / "tiny_ckpt" / "tokenizer.json"
    save_released(RandomModel(WIDE, 3), WIDE, target, tokenizer_file=tokenizer)
    return target


def logits_of(placed, tokens):
    """float32 [ranks * PLACES, WIDTH, V] of prompts of WIDTH tokens, int [ranks, PLACES, WIDTH]."""
    ranks = []
    for mine in tokens:
        segments = [
            Segment(ids, 0, WIDTH, i, tuple(range(i * PAGES, (i + 1) * PAGES)))
            for i, ids in enumerate(mine)
        ]
        ranks.append(build_rows(segments, BUCKET, WIDE.engram_max_ngram_size - 1))
    rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *ranks)
    return np.asarray(placed.step(placed.new_cache(), placed.placement.put(rows, BY_RANK))[1])


@pytest.mark.parametrize("numerics", [FLOAT32, PACKED], ids=lambda n: n.name)
def test_wide_model(directory, numerics):
    tokens = np.random.default_rng(1).integers(3, 500, (4, PLACES, WIDTH))
    one = Placed.of("tp1", directory, numerics)
    want = np.concatenate([logits_of(one, mine[None]) for mine in tokens])
    for name in ("tp8", "tp2xdep4"):
        placed = Placed.of(name, directory, numerics)
        assert placed.placement.division.notes == ()
        got = logits_of(placed, tokens[: placed.ranks])
        expected = want[: len(got)]
        if numerics is FLOAT32:
            assert np.abs(got - expected).max() < SHARDED_ABS
            np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))
        else:
            assert cosines(got, expected).mean() > E2E_COSINE_MEAN
