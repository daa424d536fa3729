"""``moe_gate``: scores, selection and weights of the routed experts (ARCHITECTURE section 8)."""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.moe_gate import ref


def build(kernels: str) -> Callable:
    """moe_gate(x [..., D], weight [E, D], bias f32 [..., E], *, top_k, scale) -> ids int32, weights
    f32 [..., top_k].

    Scores are sqrt(softplus(x W^T)) in float32. The bias (one row per row of x: text or image)
    counts for the selection only. Ties go to the lowest id; ids come in order of falling selection
    score. Weights are renormalised over the selection (+1e-20) and multiplied by ``scale``.
    """
    return choose("moe_gate", kernels, {"reference": ref.moe_gate})
