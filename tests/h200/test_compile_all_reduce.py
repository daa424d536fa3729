"""The peer-to-peer all-reduce compiles for H200s without spilling a register, and the step that
makes its calls stays in one command buffer.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv41_jax.compiling import COMPILER_OPTIONS
from pallas_kernels import dispatch
from pallas_kernels.all_reduce import kernel_sm90
from pallas_kernels.all_reduce.exchange import RESIDENT, THREADS, Exchange
from pallas_kernels.norm import rms_norm
from sharding.collectives import ALL_REDUCES
from sharding.hlo import collectives
from sharding.peer import PeerMemory
from tests.h200.test_compile_mhc import bf16, f32, reports
from tools.h200_compile import compile_for_h200, h200_mesh

pytestmark = pytest.mark.h200

__all__ = ["reports"]
WIDTH = 5120
MODEL = ("model",)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize(
    ("ranks", "rows"), [(2, 1), (2, 8), (2, 64), (4, 32), (4, 64), (8, 8), (8, 64), (16, 64)]
)
def test_all_reduce(ranks, rows, reports):
    e = Exchange(ranks, rows, WIDTH)

    def run(*args):
        return kernel_sm90.all_reduce(*args, exchange=e, slot=2)

    compile_for_h200(run, bf16(rows, WIDTH), i32(1, e.table_words), bf16(rows, WIDTH))


@pytest.mark.parametrize(
    ("ranks", "rows", "x", "union"),
    [
        (2, 64, f32(64, 64640), False),  # logits: more than a vector a thread
        (8, 64, f32(64, 16160), False),
        (8, 1, bf16(1, 3200), False),
        (16, 8, bf16(8, 6144), True),
    ],
)
def test_gather(ranks, rows, x, union, reports, tmp_path):
    room = rows * x.shape[1] * x.dtype.itemsize
    e = Exchange(ranks, rows, WIDTH, room=room)

    def run(*args):
        return kernel_sm90.gather(*args, exchange=e, half=1, union=union)

    compile_for_h200(run, x, i32(1, e.table_words), x)
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    (used,) = map(int, re.findall(r"Used (\d+) registers", report))
    assert RESIDENT // 132 * THREADS * used <= 65536, "its blocks would not all run at once"


def test_report(reports):
    e = Exchange(2, 8, WIDTH)

    def run(*args):
        return kernel_sm90.report(*args, exchange=e)

    compile_for_h200(run, i32(1, e.table_words), bf16(8, WIDTH))


@pytest.mark.parametrize(
    ("ranks", "rows", "width"), [(2, 1, WIDTH), (2, 64, WIDTH), (2, 8, 1000), (8, 16, WIDTH)]
)
def test_all_reduce_norm(ranks, rows, width, reports):
    e = Exchange(ranks, rows, width)

    def run(*args):
        return kernel_sm90.all_reduce_norm(*args, exchange=e, slot=0, norm_eps=1e-20)

    y, mix = bf16(rows, width), f32(rows, 4)
    streams = bf16(rows, 4, width), y, mix, f32(rows, 4, 4), mix, bf16(width)
    compile_for_h200(run, *streams, i32(1, e.table_words), y)


def test_a_step_of_two_ranks_is_one_command_buffer(tmp_path: Path, monkeypatch):
    """Products, all-reduces and norms; no collective of XLA's is left."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    mesh = h200_mesh(2, "model")
    e = Exchange(2, 8, WIDTH)
    memory = PeerMemory(mesh, MODEL, e, "mosaic", None, None)
    weight = jnp.ones(WIDTH, jnp.bfloat16)

    def step(x, w, v, table):
        with memory.calls(table) as calls:
            for _ in range(4):
                x = rms_norm(ALL_REDUCES["peer"](x @ w @ v, MODEL) + x, weight, 1e-6)
            return x, calls.finish()

    def on(spec: PartitionSpec, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    ours, whole = memory.table_spec, PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(ours, whole, whole, ours), out_specs=ours, check_vma=False
    )
    inputs = (
        on(ours, bf16(16, WIDTH)),
        on(whole, bf16(WIDTH, 640)),
        on(whole, bf16(640, WIDTH)),
        on(ours, i32(2, e.table_words)),
    )
    lowered = jax.jit(mapped, donate_argnums=0).trace(*inputs).lower(lowering_platforms=("cuda",))
    dumped = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(COMPILER_OPTIONS | dumped)
    assert collectives(compiled.as_text()) == {}
    (thunks,) = [p.read_text() for p in tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")]
    outermost = [line for line in thunks.splitlines() if re.match(r"\d+: ", line)]
    assert len(outermost) == 1 and "kCommandBuffer" in outermost[0]
    assert len(re.findall(r"^ +\d+: kCustomCall ", thunks, re.M)) == 6 + 1  # calls and the report
