"""Compile jitted JAX programs for an NVIDIA H200 on a machine that has no GPU.

Needs Python 3.12 or newer with ``jax[cuda13]==0.11.2`` (about 4 GB; no driver). Runs the real ptxas
for sm_90a, so it rejects what Hopper would reject (layouts, swizzles, dtypes, shared memory) and
reports registers, spills, aliased and temporary bytes. It says nothing about speed.

    from tools.h200_compile import compile_for_h200
    compiled = compile_for_h200(f, jax.ShapeDtypeStruct((8, 5120), jnp.bfloat16), donate=(0,))
    compiled.memory_analysis().alias_size_in_bytes

Import this before jax is used. Environment that helps: MOSAIC_GPU_DUMP_TO=DIR with
MOSAIC_GPU_DUMP_PTX=1 and MOSAIC_GPU_DUMP_PTXAS=1 (registers and spills per kernel);
XLA_FLAGS=--xla_dump_to=DIR, then ``*thunk_sequence_after_thunk_passes.txt`` shows what lands in
command buffers.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0" runtime_version: "13.0.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
runtime_version { major: 13 minor: 0 patch: 0 }
"""


def h200_mesh(devices: int = 1, axis: str = "x") -> Mesh:
    """A mesh of compile-only H200s of one host (one process)."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{devices}", target_config=H200
    )
    return Mesh(np.array(topology.devices), (axis,))


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    devices: int = 1,
    axis: str = "x",
    in_shardings: Any = None,
    out_shardings: Any = None,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Lower and compile ``fn`` for `devices` H200s; raises what the compiler raises.

    args are arrays or ShapeDtypeStructs. Shardings default to replicated. options: compiler
    options, those that the program is compiled with in earnest.
    """
    mesh = h200_mesh(devices, axis)
    replicated = NamedSharding(mesh, PartitionSpec())
    abstract = AbstractMesh(
        (devices,),
        (axis,),
        abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
    )
    with jax.sharding.use_abstract_mesh(abstract):
        jitted = jax.jit(
            fn,
            in_shardings=replicated if in_shardings is None else in_shardings,
            out_shardings=replicated if out_shardings is None else out_shardings,
            donate_argnums=donate,
        )
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=options)
