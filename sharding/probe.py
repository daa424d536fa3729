"""Figures of the devices at hand, measured in a few seconds: the machine ``this``."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.compiling import jit
from sharding.hardware import ASSUMED, MEANINGS, Figure, Hardware

_AXIS = "all"
_MEASURED = "measured now"


def this_machine() -> Hardware:
    """Every figure that an estimate needs, measured on the devices of this process or assumed as
    for other machines; nothing is said about watts.
    """
    devices = jax.local_devices()
    gpu = devices[0].platform == "gpu"
    tflops = _matrix_tflops(4096 if gpu else 512)
    figures: dict[str, Figure | None] = dict.fromkeys(MEANINGS)
    figures |= ASSUMED | {
        "gpus_per_domain": Figure(len(devices), "devices of this process, assumed to be linked"),
        "memory_gb": _memory_gb(devices),
        "memory_tbps": Figure(_memory_tbps(1 << (28 if gpu else 22)), _MEASURED),
        "bf16_tflops": Figure(tflops, _MEASURED),
        "fp8_tflops": Figure(tflops, "as bf16: FP8 is dequantised"),
        "launch_us": Figure(_launch_us(), _MEASURED),
    }
    if len(devices) > 1:
        mesh = jax.make_mesh((len(devices),), (_AXIS,), devices=devices)
        figures["collective_us"] = Figure(_all_reduce_us(mesh, 1 << 10), _MEASURED)
        size = 1 << (26 if gpu else 20)
        sent = 2 * (len(devices) - 1) / len(devices) * 4 * size
        figures["link_gbps"] = Figure(sent / _all_reduce_us(mesh, size) / 1e3, _MEASURED)
    title = f"{len(devices)} x {devices[0].device_kind}"
    return Hardware("this", title, "bf16", True, figures)


def _seconds(function: Callable, *arguments: Any) -> float:
    """The best of a few calls of a compiled function."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


def _memory_gb(devices: list) -> Figure:
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return Figure(stats["bytes_limit"] / 1e9, "bytes that JAX may use")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Figure(total / len(devices) / 1e9, "memory of the machine, an equal share")


def _memory_tbps(count: int) -> float:
    """A copy of so many float32 numbers, read and written once."""
    return 2 * 4 * count / _seconds(jit(lambda x: x + 1), jnp.zeros(count, jnp.float32)) / 1e12


def _matrix_tflops(n: int) -> float:
    square = jnp.ones((n, n), jnp.bfloat16)
    return 2 * n**3 / _seconds(jit(jnp.matmul), square, square) / 1e12


def _launch_us(count: int = 64) -> float:
    """One of a chain of products too small to take time themselves."""

    def chain(x: Array, w: Array) -> Array:
        for _ in range(count):
            x = x @ w
        return x

    small = jnp.eye(64, dtype=jnp.float32)
    return _seconds(jit(chain), small[:8], small) / count * 1e6


def _all_reduce_us(mesh: Mesh, count: int, repeats: int = 8) -> float:
    """One of a chain of all-reduces of so many float32 numbers."""

    def chain(x: Array) -> Array:
        for _ in range(repeats):
            x = jax.lax.psum(x, _AXIS) / mesh.size
        return x

    whole = PartitionSpec()
    function = jit(
        jax.shard_map(chain, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )
    x = jax.device_put(jnp.ones(count, jnp.float32), NamedSharding(mesh, whole))
    return _seconds(function, x) / repeats * 1e6
