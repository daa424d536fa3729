"""The four encodings of ARCHITECTURE section 0.1 and their rounding rules."""

from pallas_kernels.quant.encodings import (
    Fp4KvRows,
    Fp4Rows,
    Fp8Blocks,
    Fp8Rows,
    Packed,
    dequantized,
)
from pallas_kernels.quant.rounding import e2m1_decode, e2m1_encode, e4m3, pow2ceil_byte, ue8m0

__all__ = [
    "Fp4KvRows",
    "Fp4Rows",
    "Fp8Blocks",
    "Fp8Rows",
    "Packed",
    "dequantized",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3",
    "pow2ceil_byte",
    "ue8m0",
]
