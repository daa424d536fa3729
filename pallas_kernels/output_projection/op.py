"""``output_projection``: grouped low-rank projection of the attention output (ARCHITECTURE 4.6)."""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.output_projection import ref


def build(kernels: str) -> Callable:
    """output_projection(o [..., H, K], wo_a [G*N, H*K/G], wo_b [D, G*N], *, groups, numerics) ->
    [..., D].

    o already carries the inverse RoPE. wo_a multiplies unrounded activations (the reference
    dequantises it), its output is rounded to ``numerics.dtype``; wo_b is a ``linear``.
    """
    return choose("output_projection", kernels, {"reference": ref.output_projection})
