"""Which implementation exchanges rows between tensor ranks, and what it needs."""

import jax.numpy as jnp

from dsv41_jax.errors import UserError
from pallas_kernels.all_reduce.exchange import MAX_ROWS, VECTOR_BYTES
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.numerics import Numerics
from sharding.layouts import Division
from sharding.peer import PeerMemory, check_devices
from sharding.place import Placement

TIMEOUT_S = 30.0  # ranks start a first step seconds apart while programs are loaded
AGREED = 4096  # bytes of what is sampled for a row, its alternatives included
KINDS = ("auto", "psum", "peer")
HELP = (
    f"sums over tensor ranks: psum of float32 parts, or peer, whose kernels store bfloat16 parts to"
    f" the memory of the other GPUs in programs of up to {MAX_ROWS} rows, and all else that tensor"
    f" ranks exchange there (XLA in others); auto (default): peer on Hopper GPUs of one process"
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
    """For the sums and gathers of a program of so many rows a data rank. None where XLA's
    collectives take them: there are more than the kernels hold, or no tensor ranks. kernels: of
    ``peer_kernels``.
    """
    shape = placement.division.layout.mesh_shape
    axes = tuple(axis for axis in placement.division.axes["heads"] if shape[axis] > 1)
    if not kernels or not axes or not 0 < rows <= MAX_ROWS:
        return None
    width = placement.division.cfg.hidden_size
    room = rows * _gathered_bytes(placement.division)
    return PeerMemory.make(
        placement.mesh,
        axes,
        rows=rows,
        width=width,
        timeout_s=TIMEOUT_S,
        room=room,
        kernels=kernels,
    )


def _gathered_bytes(division: Division) -> int:
    """That a rank sends for one row in the largest gather of a program."""
    cfg, ranks = division.cfg, division.ways("heads")
    whole = [cfg.hidden_size, cfg.dspark_markov_rank]
    if cfg.engram_layer_ids:
        whole.append(cfg.engram_width)
    parts = [(cfg.hc_mult + 1) * cfg.hidden_size, cfg.attention_width]
    sizes = [AGREED, 4 * -(-cfg.vocab_size // ranks)]
    sizes += [2 * n for n in whole] + [2 * -(-n // ranks) for n in parts]
    return -(-max(sizes) // VECTOR_BYTES) * VECTOR_BYTES
