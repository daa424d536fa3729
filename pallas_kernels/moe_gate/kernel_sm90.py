"""Router on Hopper in one launch: logits on the tensor cores, selection behind them (ARCHITECTURE
section 8, steps 1 to 3). Up to eight rows may take all multiprocessors instead (``spread_ptx``).

A cluster of blocks shares a tile of rows, each block along its part of K. Experts are the M side of
the products, rows the N side. Products of bf16 are exact in float32, so logits are float32 up to
the order of additions, which depends on the tuning alone.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.moe_gate import select_ptx, spread_kernel
from pallas_kernels.moe_gate.spread_kernel import row_flags

BK = 64  # columns of a pipeline step: 128 bytes, one swizzle
GROUP = 128  # experts a warpgroup multiplies
SMEM_BYTES = 226 * 1024
MAX_TOP_K = 8
TILING = (
    plgpu.TilingTransform((8, BK)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
RING = plgpu.RefType(TILING)
TUNED = Path(__file__).parents[1] / "tuned" / "nvidia-h200.json"


@dataclass(frozen=True)
class Tuning:
    """tile: rows of a cluster, splits: its blocks, which share K; ``spread``: experts over all
    blocks instead, for up to eight rows.
    """

    tile: int
    splits: int = 1
    stages: int = 8  # at most; as many as shared memory holds
    spread: bool = False

    def __post_init__(self):
        if self.tile not in (8, 16, 32, 64, 128):
            raise ValueError(f"{self.tile=} must be 8, 16, 32, 64 or 128")
        if self.splits not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.splits=} must be 1, 2, 4, 8 or 16")


@lru_cache
def tuned(rows: int, experts: int, d: int) -> Tuning:
    """The measured setting of the smallest bucket that holds ``rows``, else of the largest; fewer
    splits where they do not divide the steps of K.
    """
    entries = [e for e in json.loads(TUNED.read_text())["moe_gate"] if e["experts"] == experts]
    entries.sort(key=lambda e: e["rows"])
    by_rows = [(e.pop("rows"), Tuning(**{k: e[k] for k in e if k != "experts"})) for e in entries]
    if not by_rows:
        return Tuning(8)
    best = next((tuning for most, tuning in by_rows if rows <= most), by_rows[-1][1])
    return replace(best, splits=math.gcd(best.splits, d // BK))


def unfit(x: Array, weight: Array, top_k: int) -> str:
    """Why the kernel does not take these operands; empty if it does."""
    experts, d = weight.shape
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"{x.dtype=} and {weight.dtype=} must be bfloat16"
    if experts % GROUP or not 0 < experts <= 3 * GROUP:
        return f"{experts=} must be 128, 256 or 384"
    if d % BK:
        return f"hidden size {d} must be a multiple of {BK}"
    if not 0 < top_k <= MAX_TOP_K:
        return f"{top_k=} must be 1 to {MAX_TOP_K}"
    return ""


def moe_gate(
    x: Array,
    weight: Array,
    bias: Array,
    bias_vl: Array | None = None,
    image: Array | None = None,
    live: Array | None = None,
    *,
    top_k: int,
    scale: float,
    tuning: Tuning | None = None,
) -> tuple[Array, Array]:
    """``op.build``'s contract on an sm_90 GPU: x bf16 [..., D], weight bf16 [E, D] with E of 128,
    256 or 384 and D a multiple of 64, biases float32, top_k up to 8; else ``ValueError``.

    A row's result has the same bits whatever the other rows, as long as ``tuning`` is the same.
    Rows of NaN get some ids within range and NaN, and change no other row.
    """
    options = {"top_k": top_k, "scale": scale, "tuning": tuning}
    ids, weights, _ = counted(x, weight, bias, bias_vl, image, live, **options)
    return ids, weights


def counted(
    x: Array,
    weight: Array,
    bias: Array,
    bias_vl: Array | None = None,
    image: Array | None = None,
    live: Array | None = None,
    *,
    top_k: int,
    scale: float,
    tuning: Tuning | None = None,
) -> tuple[Array, Array, Array]:
    """``moe_gate`` and how many experts of each row were scored exactly, int32 [...]."""
    if reason := unfit(x, weight, top_k):
        raise ValueError(f"moe_gate: {reason}")
    *lead, d = x.shape
    experts = weight.shape[0]
    _check_biases(lead, experts, bias, bias_vl, image)
    rows = x.size // d
    if rows == 0:
        empty = (*lead, top_k)
        return jnp.zeros(empty, jnp.int32), jnp.zeros(empty), jnp.zeros(lead, jnp.int32)
    tuning, flags = tuning or tuned(rows, experts, d), row_flags(rows, image, live)
    if tuning.spread:
        operands = x.reshape(rows, d), weight, bias, bias_vl, flags
        ids, weights, passed = spread_kernel.moe_gate(*operands, top_k=top_k, scale=scale)
        return ids.reshape(*lead, top_k), weights.reshape(*lead, top_k), passed.reshape(lead)
    if d // BK % tuning.splits:
        raise ValueError(f"{tuning.splits=} must divide {d // BK} steps of K")
    s = Shape(rows, d, experts, top_k, scale, bias.ndim > 1, tuning, flags is not None)
    x = x.reshape(rows, d)
    if rows > 8 and rows % 8:  # a copy's source has whole groups of 8 rows, or less than one
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))
    bias = bias.reshape(-1)
    more = () if flags is None else (bias if bias_vl is None else bias_vl, flags)
    ids, weights, passed = launcher(s)(x, weight, bias, *more)
    return ids.reshape(*lead, top_k), weights.reshape(*lead, top_k), passed.reshape(lead)


def _check_biases(
    lead: list[int], experts: int, bias: Array, bias_vl: Array | None, image: Array | None
) -> None:
    if bias.shape not in ((experts,), (*lead, experts)) or bias.dtype != jnp.float32:
        raise ValueError(f"{bias.shape=} {bias.dtype=} must be float32 {(*lead, experts)}")
    if (bias_vl is None) != (image is None):
        raise ValueError("bias_vl and image must come together")
    if bias_vl is not None and (bias.ndim, bias_vl.shape) != (1, (experts,)):
        raise ValueError(f"{bias.shape=} and {bias_vl.shape=} must be {(experts,)}")


@dataclass(frozen=True)
class Shape:
    """The static sizes of a launch."""

    rows: int
    d: int
    experts: int
    top_k: int
    scale: float
    bias_rows: bool
    tuning: Tuning
    flags: bool = False

    @property
    def groups(self) -> int:
        return self.experts // GROUP

    @property
    def steps(self) -> int:
        return self.d // BK // self.tuning.splits

    @property
    def stage_rows(self) -> int:
        """Rows of BK columns a step brings: weights, then x."""
        return self.experts + self.tuning.tile

    @property
    def stages(self) -> int:
        held = SMEM_BYTES // (2 * BK * self.stage_rows)
        # The ring holds the block's logits once the products are done.
        need = -(-2 * self.tuning.tile * self.experts // (BK * self.stage_rows))
        return max(need, min(self.tuning.stages, held, self.steps))

    @property
    def clusters(self) -> int:
        return -(-self.rows // self.tuning.tile)

    @property
    def select(self) -> select_ptx.Select:
        t = self.tuning
        return select_ptx.Select(
            self.rows,
            t.tile,
            self.experts,
            self.top_k,
            self.scale,
            t.splits,
            4 * self.groups,
            self.bias_rows,
            self.flags,
        )


def _asm(lines: list[str], operands: list[ir.Value], constraints: str) -> None:
    ptx = "{\n" + "\n".join(lines) + "\n}"
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, ptx, constraints, asm_dialect=0, has_side_effects=True)


def _address(ref: ir.Value, bits: int = 64) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mu.memref_ptr(ref))


def make_publish(s: Shape) -> Callable:
    """(acc f32 [128, tile] of this warpgroup, ring): logits of the block to the ring's memory."""
    tile = s.tuning.tile
    lines = select_ptx.publish(tile, s.experts)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, RING), return_type=())
    def publish(ctx, acc, ring):
        values = [vector.extract(v, [], [i]) for v in acc.registers.flat for i in range(2)]
        _asm(lines, [*values, _address(ring, 32)], ",".join(["f"] * tile + ["r"]))

    return publish


def make_select(s: Shape) -> Callable:
    """(ring, bias, ids, weights, passed, tile index, with flags bias of images and flags): select
    the rows this block owns.
    """
    lines, more = select_ptx.select(s.select), 2 * s.flags
    refs = [RING, *[plgpu.RefType()] * 4, plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * more]

    @plgpu.inline_mgpu(arg_types=tuple(refs), return_type=())
    def select(ctx, ring, bias, ids, weights, passed, tile, *flagged):
        gmem = [_address(ref) for ref in (bias, ids, weights, passed)]
        operands = [_address(ring, 32), *gmem, tile.registers.item(), *map(_address, flagged)]
        _asm(lines, operands, "r,l,l,l,l,r" + ",l" * more)

    return select


def make_sync() -> Callable:
    """All threads of the cluster, with their shared memory."""

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def sync(ctx):
        _asm([select_ptx.CLUSTER_SYNC], [], "")

    return sync


class Kernel:
    def __init__(self, s: Shape):
        self.s = s
        self.publish, self.select = make_publish(s), make_select(s)
        self.cluster_sync = make_sync()
        self.split = s.tuning.splits > 1

    def stream(self, x, weight, ring, full, empty, tile) -> None:
        s = self.s

        def step(i, carry):
            slot = i % s.stages

            @pl.when(i >= s.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            columns = pl.ds((lax.axis_index("split") * s.steps + i) * BK, BK)
            plgpu.copy_gmem_to_smem(
                weight.at[:, columns],
                ring.at[slot, pl.ds(0, s.experts)],
                full.at[slot],
            )
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(tile * s.tuning.tile, s.tuning.tile), columns],
                ring.at[slot, pl.ds(s.experts, s.tuning.tile)],
                full.at[slot],
            )
            return carry

        lax.fori_loop(0, s.steps, step, None)

    def multiply(self, ring, full, empty, group) -> None:
        s = self.s

        def scope(acc):
            def step(i, carry):
                slot = i % s.stages
                plgpu.barrier_wait(full.at[slot])
                w = ring.at[slot, pl.ds(group * GROUP, GROUP)]
                rows = ring.at[slot, pl.ds(s.experts, s.tuning.tile)]
                plgpu.wgmma(acc, w, rows.transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[(i - 1) % s.stages])

                return carry

            lax.fori_loop(0, s.steps, step, None)
            plgpu.wgmma_wait(0)
            return acc[...]

        acc = pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((GROUP, s.tuning.tile), jnp.float32))
        self.publish(acc, ring)

    def body(self, x, weight, bias, *refs) -> None:
        *flagged, ids, weights, passed, ring, full, empty = refs
        s, wg = self.s, lax.axis_index("wg")
        tile = lax.axis_index("tile")

        @pl.when(wg == s.groups)
        def _():
            if s.groups > 1:
                plgpu.set_max_registers(24, action="decrease")
            self.stream(x, weight, ring, full, empty, tile)
            if self.split:  # the barriers of ``select`` are for all threads of the cluster
                self.cluster_sync()
                self.cluster_sync()

        @pl.when(wg < s.groups)
        def _():
            if s.groups > 1:
                plgpu.set_max_registers(160, action="increase")
            self.multiply(ring, full, empty, wg)
            self.select(ring, bias, ids, weights, passed, tile, *flagged)


@lru_cache(maxsize=64)
def launcher(s: Shape) -> Callable:
    """(x [R, D], weight [E, D], bias [E] or [R * E], with flags bias of images and flags) -> ids,
    weights [R * k] and candidates [R].
    """
    k = Kernel(s)

    def moe_gate(*refs):
        k.body(*refs)

    return plgpu.kernel(
        moe_gate,
        out_type=(
            jax.ShapeDtypeStruct((s.rows * s.top_k,), jnp.int32),
            jax.ShapeDtypeStruct((s.rows * s.top_k,), jnp.float32),
            jax.ShapeDtypeStruct((s.rows,), jnp.int32),
        ),
        grid=(s.clusters,),
        grid_names=("tile",),
        cluster=(s.tuning.splits,),
        cluster_names=("split",),
        num_threads=s.groups + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((s.stages, s.stage_rows, BK), jnp.bfloat16, transforms=TILING),
            plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            plgpu.Barrier(num_arrivals=s.groups, num_barriers=s.stages),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
