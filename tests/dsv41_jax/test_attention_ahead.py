"""What attention says is read after it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.dsv41_jax.support import rows_for, tiny


@pytest.mark.parametrize(("numerics", "count"), [("reference", 2), ("float32", 0)])
def test_attention_names_the_fp8_weights_of_its_output(numerics, count):
    model, asked = tiny(numerics), []

    def ring_attention(*arguments, ahead, **options):
        asked.append(ahead)
        return model.ops.ring_attention(*arguments, ahead=ahead, **options)

    ops = replace(model.ops, ring_attention=ring_attention)
    jax.eval_shape(lambda *rest: model.model.encoder(ops, *rest), rows_for([5]), model.cache())
    assert asked and all(len(ahead) == count for ahead in asked)
    for ahead, layer in zip(asked, model.model.layers, strict=False):
        for codes, weight in zip(ahead, (layer.attn.wo_a, layer.attn.wo_b), strict=False):
            np.testing.assert_array_equal(codes, weight().codes)
