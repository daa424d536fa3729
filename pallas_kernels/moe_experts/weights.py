"""The three matrices of an expert, or of a stack of experts."""

from dataclasses import dataclass

import jax
from jax import Array

from pallas_kernels.quant import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """w1 (gate) and w3 (up) [..., F, D], w2 (down) [..., D, F]; a stack has the expert axis
    first.
    """

    w1: Array | Packed
    w3: Array | Packed
    w2: Array | Packed
