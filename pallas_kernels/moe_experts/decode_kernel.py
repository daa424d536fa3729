"""The persistent launch of the decode kernel (``kernel_sm90``): six warpgroups a block around a
ring of SMEM slots.

One warpgroup streams weight chunks and one the tokens to multiply them with; three dequantise in
registers and multiply, 64 rows each; one finishes tiles: sums K splits, applies SwiGLU, scatters.
All walk the block's share of one list of tiles: up, then down. The down projection of an expert
waits for the counter of its SwiGLU outputs, while its weights already stream.

No tile depends on a later one of the list, and a block takes its tiles in the order of the list,
all up tiles before the first down tile, whichever they are (``decode_share``): nothing can deadlock
as long as all blocks run at once. Each tile has a fixed order of additions, whichever block takes
it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts import decode_ptx as ptx
from pallas_kernels.moe_experts.decode_shape import Part, Shape
from pallas_kernels.moe_experts.decode_share import share
from pallas_kernels.moe_experts.repack import TILE_BLOCKS, PackedExperts

SMEM_BYTES = 226 * 1024
STREAM_TOKENS, STREAM_WEIGHTS, FINISH = TILE_BLOCKS, TILE_BLOCKS + 1, TILE_BLOCKS + 2


@dataclass(frozen=True)
class Refs:
    """Everything a block sees; pairs hold the routed and the shared one."""

    plan: Any
    x: tuple
    weights: tuple  # by (down, shared)
    t: tuple
    y: tuple
    workspace: tuple
    w_smem: Any
    x_smem: Any
    acc_smem: Any
    full: Any
    empty: Any
    acc_full: Any
    acc_empty: Any


class Kernel:
    """``phases`` (up, down): both in one launch, or one of them."""

    def __init__(self, s: Shape, phases: tuple[bool, bool], round_gates: bool):
        self.s, self.phases, self.fused = s, phases, all(phases)
        self.parts = ((s.up, s.up8), (s.down, s.down8))
        every = [p for pair in self.parts for p in pair]
        self.chunk_rows = TILE_BLOCKS * max(p.chunk.rows for p in every)
        self.token_rows = max(p.token_rows for p in every)
        self.acc_words = 64 * s.shared_tokens
        free = SMEM_BYTES - 4 * TILE_BLOCKS * self.acc_words
        self.stages = min(s.tuning.stages, free // (256 * (self.chunk_rows + self.token_rows)))
        self.group = {p: p.group(min(s.tuning.group, self.stages // 2)) for p in every}
        self.stage = {p: ptx.make_stage(p.chunk, p.tokens, self.group[p]) for p in every}
        self.stash = {p: ptx.make_stash(p.tokens) for p in every}
        self.spill = {p: ptx.make_spill(p.tokens) for p in self.parts[0]}
        self.others = {p: ptx.make_wait(p.splits - 1, clear=True) for p in self.parts[0]}
        self.swiglu = {
            p: ptx.make_swiglu(
                p.tokens, p.splits, limit=s.limit, routed=not p.shared, round_gates=round_gates
            )
            for p in self.parts[0]
        }
        apart = s.rows if s.joint else None
        self.scatter = {p: ptx.make_scatter(p.tokens, p.splits, s.d, apart) for p in self.parts[1]}
        self.signal, self.ready = ptx.make_signal(), ptx.make_wait(s.up.tiles)
        self.reset = ptx.make_reset(s.plan.counters, s.arrivals, s.blocks)

    def walk(self, refs: Refs, work: Callable, carry=0) -> None:
        """work(part, item, tile, split, carry) -> carry over this block's tiles, shared expert
        first in each phase.
        """
        s, block, routed_items = self.s, lax.axis_index("block"), refs.plan[0]
        carry, earlier = jax.tree.map(jnp.int32, carry), 0
        for (routed, shared), wanted in zip(self.parts, self.phases, strict=True):
            if not wanted:
                continue
            tile, following = share(block, s.blocks, earlier, s.rounds)
            begin = 0
            for p, items in ((shared, s.shared_items), (routed, routed_items)):
                end = begin + p.count(items)

                def visit(at, p=p, begin=begin, following=following):
                    tile, carry = at
                    q = tile - begin
                    split, q = q % p.splits, q // p.splits
                    return following(tile), work(p, q // p.tiles, q % p.tiles, split, carry)

                tile, carry = lax.while_loop(lambda at, end=end: at[0] < end, visit, (tile, carry))
                begin = end
            earlier = begin

    def fill(self, refs: Refs, p: Part, split, carry, load: Callable):
        """load(chunk along K, slot) for a split's chunks, each once its slot is free; carry counts
        chunks.
        """

        def step(i, carry):
            slot = carry % self.stages

            @pl.when(carry >= self.stages)
            def _():
                plgpu.barrier_wait(refs.empty.at[slot])

            load(split * p.steps + i, slot)
            return carry + 1

        return lax.fori_loop(0, p.steps, step, carry)

    def stream_weights(self, refs: Refs) -> None:
        def work(p: Part, item, tile, split, carry):
            source = refs.weights[p.down][p.shared]
            expert = 0 if p.shared else refs.plan[self.s.plan.expert + item]
            base = (expert * p.tiles + tile) * p.depth

            def load(k, slot):
                target = refs.w_smem.at[slot, pl.ds(0, TILE_BLOCKS * p.chunk.rows)]
                plgpu.copy_gmem_to_smem(source.at[base + k], target, refs.full.at[slot])

            return self.fill(refs, p, split, carry, load)

        self.walk(refs, work)

    def arrival(self, p: Part, item):
        return self.s.plan.counters + item + (self.s.items if p.shared else 0)

    def stream_tokens(self, refs: Refs) -> None:
        few = self.s.arrivals <= 32  # then a bit an item spares repeated looks at its counter

        def work(p: Part, item, tile, split, carry):
            carry, seen = carry
            source = (refs.t if p.down else refs.x)[p.shared]
            one_tile = not p.down and not p.shared and self.s.rows <= dp.TILE
            if p.down and self.fused:
                arrival = self.arrival(p, item)
                bit = jnp.int32(1) << (arrival - self.s.plan.counters) if few else jnp.int32(0)

                @pl.when(seen & bit == 0)
                def _():
                    self.ready(refs.plan, arrival)

                seen = seen | bit

            def load(k, slot):
                index = k if one_tile else item * p.depth + k
                target = refs.x_smem.at[slot, pl.ds(0, p.token_rows)]
                plgpu.copy_gmem_to_smem(source.at[index], target, refs.full.at[slot])

            return self.fill(refs, p, split, carry, load), seen

        self.walk(refs, work, (0, 0))
        if self.fused:
            self.reset(refs.plan)

    def compute(self, refs: Refs, m) -> None:
        def work(p: Part, item, tile, split, carry):
            zeros = jnp.zeros((64, p.tokens), jnp.float32)
            block = pl.ds(m * p.chunk.rows, p.chunk.rows)
            group, before = self.group[p], carry

            def step(i, c):
                acc, carry = c
                slots = [(carry + g) % self.stages for g in range(group)]
                operands = []
                for slot in slots:
                    plgpu.barrier_wait(refs.full.at[slot])
                    operands += [refs.w_smem.at[slot, block], refs.x_smem.at[slot]]
                acc = self.stage[p](acc, *operands)
                for slot in slots:
                    plgpu.barrier_arrive(refs.empty.at[slot])
                return acc, carry + group

            acc = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            acc, carry = lax.fori_loop(0, p.steps // group, step, (acc, carry))

            @pl.when(before > 0)
            def _():
                plgpu.barrier_wait(refs.acc_empty.at[m])

            self.stash[p](acc, refs.acc_smem.at[m])
            plgpu.barrier_arrive(refs.acc_full.at[m])
            return carry

        self.walk(refs, work)

    def each_block(self, refs: Refs, p: Part, tile, finish: Callable) -> None:
        """finish(accumulators in SMEM, m, row block) for the blocks of a tile as they come."""
        for m in range(TILE_BLOCKS):
            row_block = tile * TILE_BLOCKS + m
            plgpu.barrier_wait(refs.acc_full.at[m])

            def run(m=m, row_block=row_block) -> None:
                finish(refs.acc_smem.at[m], m, row_block)

            if p.blocks % TILE_BLOCKS:
                pl.when(row_block < p.blocks)(run)
            else:
                run()
            plgpu.barrier_arrive(refs.acc_empty.at[m])

    def finish_up(self, refs: Refs, p: Part, item, tile, split) -> None:
        s, at = self.s, self.s.plan
        unit = item * p.tiles + tile
        ticket = at.counters + s.arrivals + 1 + (s.tickets[0] if p.shared else 0) + unit
        workspace = refs.workspace[p.shared]

        def spilled(m):
            return (unit * TILE_BLOCKS + m) * (p.splits - 1)

        def activate(acc, m, row_block):
            weight_at, t_at = item * p.tokens + at.weights, item * (s.f * p.tokens)
            self.swiglu[p](
                acc,
                refs.t[p.shared],
                workspace,
                refs.plan,
                t_at,
                weight_at,
                row_block * 4,
                spilled(m),
            )

        def complete():
            self.each_block(refs, p, tile, activate)
            if self.fused:
                self.signal(refs.plan, self.arrival(p, item))

        if p.splits == 1:
            complete()
            return

        @pl.when(split < p.splits - 1)
        def _():
            def spill(acc, m, _):
                return self.spill[p](acc, workspace, spilled(m) + split)

            self.each_block(refs, p, tile, spill)
            self.signal(refs.plan, ticket)

        @pl.when(split == p.splits - 1)
        def _():
            self.others[p](refs.plan, ticket)
            complete()

    def finish_down(self, refs: Refs, p: Part, item, tile, split) -> None:
        at = self.s.plan
        rows_at = item * p.tokens + (at.rows if p.shared else at.pairs)

        def store(acc, m, row_block):
            self.scatter[p](acc, refs.y[p.shared], refs.plan, rows_at, split, row_block * 64)

        self.each_block(refs, p, tile, store)

    def finish(self, refs: Refs) -> None:
        def work(p: Part, item, tile, split, carry):
            (self.finish_down if p.down else self.finish_up)(refs, p, item, tile, split)
            return carry

        self.walk(refs, work)

    def body(self, plan, x, x8, *refs) -> None:
        t, y = (), ()
        if not self.phases[0]:
            *t, refs = *refs[:2], refs[2:]
        up, down, up8, down8, *refs = refs
        if self.phases[0]:
            *t, refs = *refs[:2], refs[2:]
        if self.phases[1] and self.s.joint:
            y, refs = [refs[0]] * 2, refs[1:]
        elif self.phases[1]:
            *y, refs = *refs[:2], refs[2:]
        weights = ((up, up8), (down, down8))
        seen = Refs(plan, (x, x8), weights, tuple(t), tuple(y), tuple(refs[:2]), *refs[2:])
        wg = lax.axis_index("wg")
        streaming, epilogue, computing = self.s.tuning.registers

        def role(condition, registers: int, action: str, run: Callable) -> None:
            @pl.when(condition)
            def _():
                plgpu.set_max_registers(registers, action=action)
                run()

        role(wg == STREAM_WEIGHTS, streaming, "decrease", lambda: self.stream_weights(seen))
        role(wg == STREAM_TOKENS, streaming, "decrease", lambda: self.stream_tokens(seen))
        role(wg == FINISH, epilogue, "decrease", lambda: self.finish(seen))
        role(wg < TILE_BLOCKS, computing, "increase", lambda: self.compute(seen, wg))

    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        s, out, f32 = self.s, [], jnp.float32
        if self.phases[0]:
            out += t_types(s)
        if self.phases[1] and s.joint:
            out.append(jax.ShapeDtypeStruct((s.sums * s.rows, s.d), f32))
        elif self.phases[1]:
            out.append(jax.ShapeDtypeStruct((s.rows * s.k, s.down.splits, s.d), f32))
            out.append(jax.ShapeDtypeStruct((s.rows, s.down8.splits, s.d), f32))
        for p, items in ((s.up, s.items), (s.up8, s.shared_items)):
            blocks = max(1, items * p.tiles * TILE_BLOCKS * (p.splits - 1))
            out.append(jax.ShapeDtypeStruct((blocks, 128, p.tokens // 2), f32))
        return out


def t_types(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """The SwiGLU outputs of routed and shared items, as images of tokens."""
    parts = ((s.down, s.items), (s.down8, s.shared_items))
    return [jax.ShapeDtypeStruct((n * p.depth, p.token_rows, 64), jnp.int32) for p, n in parts]


@lru_cache(maxsize=64)
def launcher(s: Shape, phases: tuple[bool, bool], round_gates: bool) -> Callable:
    """(plan, x, x8, [t, t8,] weights) -> (t, t8) of the up phase alone, else (y, y8), or both as
    f32 [``s.sums`` * R, D] if ``s.joint``.

    The kernel counts in the plan's last words and leaves them zero.
    """
    k = Kernel(s, phases, round_gates)

    def moe_experts_decode(*refs):
        k.body(*refs)

    call = plgpu.kernel(
        moe_experts_decode,
        out_type=tuple(k.out_types()),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=TILE_BLOCKS + 3,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((k.stages, k.chunk_rows, 64), jnp.int32),
            plgpu.SMEM((k.stages, k.token_rows, 64), jnp.int32),
            plgpu.SMEM((TILE_BLOCKS, k.acc_words), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=k.stages),
            plgpu.Barrier(num_arrivals=TILE_BLOCKS, num_barriers=k.stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=TILE_BLOCKS),
            plgpu.Barrier(num_arrivals=1, num_barriers=TILE_BLOCKS),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )

    def launch(*args):
        *args, w = args
        assert isinstance(w, PackedExperts)
        results = call(*args, w.up, w.down, w.shared_up, w.shared_down)[2 * k.fused :]
        return results[0] if s.joint else results[:2]

    return launch
