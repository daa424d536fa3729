"""Kernels whose body is one block of PTX: its operands are addresses and 32-bit integers."""

import struct
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

SCALAR = plgpu.Layout.WG_SPLAT
BARRIER = 8  # a named barrier that the lowering does not use


def f32(value: float) -> str:
    """A float32 as PTX writes it, by its bits."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def counters() -> jax.Ref:
    """int32 zeros [32] for blocks to count in. One word would be a constant to XLA, copied for each
    call; more are zeroed for all calls of a program in one launch, and copied in loops alone.
    """
    return jax.new_ref(jnp.zeros(32, jnp.int32))


def address(ref: ir.Value, bits: int) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mu.memref_ptr(ref))


def block(
    lines: Sequence[str],
    *,
    gmem: int,
    smem: int,
    scalars: int,
    boxes: Sequence[tuple[int, tuple[int, int], int]] = (),
) -> Callable:
    """A function of ``gmem`` GMEM references, ``smem`` SMEM references and int32 ``scalars`` that
    runs ``lines``; the operands are ``$0``, ``$1`` ... in this order (64, 32 and 32 bits), then the
    address of a tensor map for each of ``boxes``: a GMEM reference's number, how many rows and
    columns of it a copy takes, the bytes of its swizzle.
    """
    ptx = "{\n" + "\n".join(lines) + "\n}"
    constraints = ",".join(["l"] * gmem + ["r"] * (smem + scalars) + ["l"] * len(boxes))

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * (gmem + smem), *[SCALAR] * scalars), return_type=()
    )
    def run(ctx, *args):
        operands = [address(ref, 64) for ref in args[:gmem]]
        operands += [address(ref, 32) for ref in args[gmem : gmem + smem]]
        operands += [value.registers.item() for value in args[gmem + smem :]]
        for number, box, swizzle in boxes:
            # Mosaic makes maps for its own copies alone; pinned by tests/h200.
            desc = ctx._get_tma_desc(args[number], (), None, box, swizzle, None)
            operands.append(llvm.ptrtoint(ir.IntegerType.get_signless(64), desc))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            operands,
            ptx,
            constraints,
            asm_dialect=0,
            has_side_effects=True,
        )

    return run
