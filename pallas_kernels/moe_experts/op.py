"""``moe_experts``: routed experts, SwiGLU, combine and the shared expert (ARCHITECTURE section 8,
steps 4 and 5).
"""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.moe_experts import ref


def build(kernels: str) -> Callable:
    """moe_experts(x [R, D], ids int32 [R, k], weights f32 [R, k], experts, shared, *, limit,
    numerics) -> [R, D].

    experts: ``ExpertWeights`` stacked [E, ...] (``Fp4Rows``), shared: one ``ExpertWeights``
    (``Fp8Blocks``); either may be plain arrays. gate and up are clamped (up on both sides, gate
    above), the routing weight multiplies before w2, expert outputs are rounded to
    ``numerics.dtype`` and summed in float32, the shared expert is added unweighted. An id of -1
    reaches no expert; such a row gets the shared expert alone.
    """
    return choose("moe_experts", kernels, {"reference": ref.moe_experts})
