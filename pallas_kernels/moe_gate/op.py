"""``moe_gate``: scores, selection and weights of the routed experts (ARCHITECTURE section 8)."""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.moe_gate import ref


def build(kernels: str) -> Callable:
    """moe_gate(x [..., D], weight [E, D], bias f32 [E] or [..., E], bias_vl f32 [E] = None, image
    bool [...] = None, live bool [...] = None, *, top_k, scale) -> ids int32, weights
    f32 [..., top_k].

    Scores are sqrt(softplus(x W^T)) in float32. The bias counts for the selection only; rows of an
    image take ``bias_vl`` where it is given. Ties go to the lowest id; ids come in order of falling
    selection score. Weights are renormalised over the selection (+1e-20) and multiplied by
    ``scale``. The ids of rows that are not live are -1, their weights have no meaning.

    The ``mosaic`` kernel takes bf16 operands of 128, 256 or 384 experts and raises ``ValueError``
    for others; ``auto`` computes those as the reference does.
    """
    return choose(
        "moe_gate",
        kernels,
        {"reference": ref.moe_gate, "mosaic": _auto if kernels == "auto" else _mosaic},
    )


def _mosaic(
    x: Array, weight: Array, *biases: Array | None, top_k: int, scale: float
) -> tuple[Array, Array]:
    from pallas_kernels.moe_gate.kernel_sm90 import moe_gate

    return moe_gate(x, weight, *biases, top_k=top_k, scale=scale)


def _auto(
    x: Array, weight: Array, *biases: Array | None, top_k: int, scale: float
) -> tuple[Array, Array]:
    from pallas_kernels.moe_gate.kernel_sm90 import moe_gate, unfit

    run = ref.moe_gate if unfit(x, weight, top_k) else moe_gate
    return run(x, weight, *biases, top_k=top_k, scale=scale)
