"""``linear``: x times a transposed weight (Lin8, Lin4, LinB and LinF of ARCHITECTURE 0.1)."""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.linear import ref


def build(kernels: str) -> Callable:
    """linear(x [..., K], weight [N, K], *, numerics, out_dtype=None) -> [..., N].

    weight: ``Fp8Blocks``, ``Fp4Rows`` or a plain array. Under ``round_activations`` the input of a
    packed weight is rounded to FP8 per 32 (AQ32). Products accumulate in float32; the result is
    cast once to ``out_dtype``, by default ``numerics.dtype``.
    """
    return choose("linear", kernels, {"reference": ref.linear})
