"""Choice of an op's implementation, made once when the record of operations is built."""

from collections.abc import Callable, Mapping

import jax

KINDS = ("auto", "reference", "interpret", "mosaic")
# Blocks that wait for one another: a GPU with fewer multiprocessors would never run them all.
MULTIPROCESSORS = 132


def on_hopper() -> bool:
    """Whether the default device is an sm_90 GPU, as far as it says of ``MULTIPROCESSORS``."""
    device = jax.devices()[0]
    if device.platform != "gpu" or str(getattr(device, "compute_capability", "")) != "9.0":
        return False
    return getattr(device, "core_count", MULTIPROCESSORS) >= MULTIPROCESSORS


def choose(op: str, kind: str, implementations: Mapping[str, Callable]) -> Callable:
    """The implementation of ``op`` for a kind of ``KINDS``.

    ``auto`` is the Mosaic kernel on sm_90 where the op has one and the reference elsewhere. A kind
    asked for by name never falls back: ``ValueError`` if the op lacks it, or if a Mosaic kernel is
    asked for without an sm_90 GPU.
    """
    if kind not in KINDS:
        raise ValueError(f"kernels {kind!r} must be one of {', '.join(KINDS)}")
    if kind == "auto":
        kind = "mosaic" if "mosaic" in implementations and on_hopper() else "reference"
    if kind not in implementations:
        raise ValueError(
            f"op {op} has no {kind!r} kernel; it has {', '.join(sorted(implementations))}"
        )
    if kind == "mosaic" and not on_hopper():
        device = jax.devices()[0].device_kind
        raise ValueError(
            f"op {op}: the 'mosaic' kernel needs an sm_90 GPU, this is {device}; it has to have"
            f" {MULTIPROCESSORS} multiprocessors"
        )
    return implementations[kind]
