"""What ``auto`` takes, on an sm_90 GPU, of kernels that do not win everywhere: the rows for which
each of them was faster there than what XLA makes of the same operands, as far as both were timed
(``baselines``; not yet: Engram rows above one). Others run through XLA. ``mhc_site`` takes the
place of two or three launches of kernels, ``output_projection`` of two.
"""

from math import prod

from jax import Array

# Of an operation, or of one of its matrices: its outputs, those of each if one launch has several,
# and inputs.
ROWS: dict[str | tuple[str, tuple[int, ...], int], range] = {
    "linear": range(1, 129),
    "normed_linear": range(1, 129),
    "grouped_projection": range(1, 129),
    "engram_rows": range(2, 1 << 30),
    "engram_gate_add": range(1, 129),
    "mhc_site": range(1, 8),
    "output_projection": range(1, 8),
}


def takes(op: str, rows: int, outputs: tuple[int, ...] = (), k: int = 0) -> bool:
    """Whether ``auto`` runs the kernel of ``op``; an entry of the matrix goes before that of all
    others.
    """
    return rows in ROWS.get((op, outputs, k), ROWS[op])


def row_count(x: Array, axes: int = 1) -> int:
    """How many rows x [..., *] has, of ``axes`` axes each."""
    return prod(x.shape[:-axes])
