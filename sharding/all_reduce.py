"""Which implementation sums over tensor ranks after attention and experts, and what it needs."""

import jax.numpy as jnp

from dsv41_jax.errors import UserError
from pallas_kernels.all_reduce.exchange import MAX_ROWS
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.numerics import Numerics
from sharding.peer import PeerMemory, check_devices
from sharding.place import Placement

KINDS = ("auto", "psum", "peer")
HELP = (
    f"sums over tensor ranks: psum of float32 parts, or peer, whose kernels store bfloat16 parts to"
    f" the memory of the other GPUs in programs of up to {MAX_ROWS} rows (psum in others); auto"
    f" (default): peer on Hopper GPUs of one process"
)


def peer_kernels(kind: str, placement: Placement | None, numerics: Numerics, kernels: str) -> str:
    """Kernels of peer-to-peer sums, "mosaic" or "reference", or "" where ``psum`` takes them all.

    kind: of ``KINDS``. UserError if it is "peer" and the layout has no tensor ranks, the numerics
    are float32, or the devices lack the kernels or belong to several processes.
    """
    tensor = placement.division.layout.tensor if placement else 1
    if kind == "peer":
        if placement is None or tensor == 1:
            name = placement.division.layout.name if placement else "tp1"
            raise UserError(f"all-reduce 'peer': layout {name} has no tensor ranks to sum over")
        if numerics.dtype != jnp.bfloat16:
            raise UserError(f"all-reduce 'peer': sums bfloat16, not numerics {numerics.name!r}")
        found = "reference" if kernels == "reference" else "mosaic"
        check_devices(placement.mesh, found)
        return found
    one_host = placement is not None and tensor > 1 and not placement.mesh.is_multi_process
    fast = kernels in ("auto", "mosaic") and numerics.dtype == jnp.bfloat16 and on_hopper()
    return "mosaic" if kind == "auto" and one_host and fast else ""


def peer_memory(placement: Placement, kernels: str, rows: int) -> PeerMemory | None:
    """For the sums of a program of so many rows a data rank. None where ``psum`` takes them: there
    are more than the kernels hold, or no tensor ranks. kernels: of ``peer_kernels``.
    """
    shape = placement.division.layout.mesh_shape
    axes = tuple(axis for axis in placement.division.axes["heads"] if shape[axis] > 1)
    if not kernels or not axes or not 0 < rows <= MAX_ROWS:
        return None
    width = placement.division.cfg.hidden_size
    return PeerMemory.make(placement.mesh, axes, rows=rows, width=width, kernels=kernels)
