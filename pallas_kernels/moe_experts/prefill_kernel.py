"""The launches of the prefill kernel (``kernel_sm90``): gather, up product, down product.

A product is persistent: blocks walk the list of (item, tile of 192 matrix rows) in turn. One
warpgroup streams weight chunks and tokens through two rings of SMEM slots, three dequantise 64 rows
each in registers and multiply them with up to 192 tokens. The width of an item's accumulators is
chosen on the device from ``WIDTHS``. Each tile has a fixed order of additions along K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe_experts import prefill_ptx as ptx
from pallas_kernels.moe_experts.prefill_shape import GROUP, WIDTHS, Ring, Shape
from pallas_kernels.moe_experts.repack import TILE_BLOCKS

# 512 threads are launched with 128 registers each; asking for more than that pool hangs.
STREAMING_REGISTERS, COMPUTING_REGISTERS = 32, 160
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@dataclass(frozen=True)
class Refs:
    plan: Any
    tokens: Any
    weights: Any
    routing: Any  # routing weights by position, of the up product
    out: Any
    w_smem: Any
    x_smem: Any
    barriers: Any


class Kernel:
    """One grouped product over all items of a plan."""

    def __init__(self, s: Shape, down: bool, round_gates: bool):
        self.s, self.p = s, s.product(down=down)
        self.ring = Ring.fitting(self.p.chunk, s.weight_slots)
        self.init = ptx.make_init(self.ring)
        self.load = ptx.make_load(self.p, self.ring, s.groups)
        self.chunk = [ptx.make_chunk(self.p, self.ring, w) for w in WIDTHS]
        if down:
            self.finish = [ptx.make_store(w, s.d) for w in WIDTHS]
        else:
            self.finish = [
                ptx.make_swiglu(w, limit=s.limit, round_gates=round_gates) for w in WIDTHS
            ]

    def walk(self, refs: Refs, work: Callable) -> None:
        """work(item, tile, (chunks, stages)) -> counters, over this block's tiles."""
        first, blocks = lax.axis_index("block"), self.s.blocks
        count = refs.plan[0] * self.p.tiles

        def step(i, carry):
            q = first + i * blocks
            return work(q // self.p.tiles, q % self.p.tiles, carry)

        steps = jnp.maximum(count - first + blocks - 1, 0) // blocks
        lax.fori_loop(0, steps, step, (jnp.int32(0), jnp.int32(0)))

    def item(self, refs: Refs, item) -> tuple:
        """First group, groups and the index of the width."""
        groups = refs.plan[self.s.at_groups + item]
        return refs.plan[self.s.at_group + item], groups, (groups + 1) // 2 - 1

    def stream(self, refs: Refs) -> None:
        def work(item, tile, carry):
            group, groups, index = self.item(refs, item)
            expert = refs.plan[self.s.at_expert + item]
            base = (expert * self.p.tiles + tile) * self.p.depth
            width = 2 * index + 2
            few, half = width <= 4, width <= 12
            per_stage = jnp.where(few, 8, jnp.where(half, 2, 1))
            stages = (self.p.units + per_stage - 1) // per_stage

            def step(c, carry):
                chunks, used = carry
                self.load(
                    refs.weights, refs.tokens, refs.w_smem, refs.x_smem, refs.barriers,
                    base + c, c, group, groups, width, per_stage, chunks, used,
                )  # fmt: skip
                return chunks + 1, used + stages

            return lax.fori_loop(0, self.p.depth, step, carry)

        self.walk(refs, work)

    def compute(self, refs: Refs, m) -> None:
        def work(item, tile, carry):
            group, groups, index = self.item(refs, item)
            row_block = tile * TILE_BLOCKS + m

            def run(i: int, carry):
                stages = self.p.stages(WIDTHS[i])
                zeros = jnp.zeros((64, GROUP * WIDTHS[i]), jnp.float32)

                def step(_, c):
                    acc, chunks, used = c
                    acc = self.chunk[i](
                        acc, refs.w_smem, refs.x_smem, refs.barriers, m, chunks, used
                    )
                    return acc, chunks + 1, used + stages

                acc = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                acc, *carry = lax.fori_loop(0, self.p.depth, step, (acc, *carry))

                @pl.when(row_block < self.p.blocks)
                def _():
                    self.store(refs, i, acc, group, groups, row_block)

                return tuple(carry)

            branches = [lambda carry, i=i: run(i, carry) for i in range(len(WIDTHS))]
            return lax.switch(index, branches, carry)

        self.walk(refs, work)

    def store(self, refs: Refs, i: int, acc, group, groups, row_block) -> None:
        if self.p.down:
            self.finish[i](acc, refs.out, group, groups, row_block * 64)
            return
        # Where 32 columns lie in the tokens of the down product: half a unit, or the chunk's tail.
        s, chunk = self.s, self.s.product(down=True).chunk
        half = row_block % (chunk.bk // 32)
        tail = half >= 2 * chunk.units
        core = row_block // (chunk.bk // 32) * (s.groups * (chunk.bk // 8))
        core += half // 2 * (s.groups * 8) + half % 2 * 4
        self.finish[i](acc, refs.out, refs.routing, group, groups, core, jnp.where(tail, 4, 8))

    def body(self, plan, tokens, weights, *refs) -> None:
        routing, refs = (None, refs) if self.p.down else (refs[0], refs[1:])
        seen = Refs(plan, tokens, weights, routing, *refs)
        self.init(seen.barriers)
        wg = lax.axis_index("wg")

        @pl.when(wg == TILE_BLOCKS)
        def _():
            plgpu.set_max_registers(STREAMING_REGISTERS, action="decrease")
            self.stream(seen)

        @pl.when(wg < TILE_BLOCKS)
        def _():
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            self.compute(seen, wg)


@lru_cache(maxsize=64)
def product(s: Shape, down: bool, round_gates: bool) -> Callable:
    """up: (plan, x image, weights, routing) -> t image; down: (plan, t image, weights) -> y bf16
    [P, D].
    """
    k = Kernel(s, down, round_gates)
    out = (
        jax.ShapeDtypeStruct((s.groups * GROUP, s.d), jnp.bfloat16)
        if down
        else jax.ShapeDtypeStruct((s.groups * s.f * 4,), jnp.int32)
    )

    def moe_experts_prefill(*refs):
        k.body(*refs)

    return plgpu.kernel(
        moe_experts_prefill,
        out_type=out,
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=TILE_BLOCKS + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((k.ring.weight_slots * k.ring.weight_bytes // 4,), jnp.int32),
            plgpu.SMEM((k.ring.token_slots * k.ring.token_bytes // 4,), jnp.int32),
            plgpu.SMEM((2 * k.ring.barriers,), jnp.int32),
        ),
        compiler_params=PARAMS,
    )


def gather(x: Array, rows: Array, s: Shape) -> Array:
    """x bf16 [R, D], rows int32 [P] to the image of the tokens at all positions (``image``)."""
    steps = s.d // 128
    unroll = gcd(steps, 4)
    run = ptx.make_gather(s.groups, unroll, steps // unroll, s.d)

    def moe_experts_gather(x, rows, out):
        run(x, rows, out, lax.axis_index("group"))

    return plgpu.kernel(
        moe_experts_gather,
        out_type=jax.ShapeDtypeStruct((s.groups * s.d * 4,), jnp.int32),
        grid=(s.groups,),
        grid_names=("group",),
        compiler_params=PARAMS,
    )(x, rows)
