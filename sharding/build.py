"""Layout -> record of operations. One device needs no collectives: ``tp1`` is the local record."""

from dsv41_jax.errors import UserError
from dsv41_jax.ops import Ops, local_ops
from pallas_kernels.numerics import Numerics

LAYOUTS = ("tp1",)


def build_ops(layout: str, numerics: Numerics, kernels: str = "auto") -> Ops:
    """The operations of a named layout; UserError for a layout, or a kind of kernels, that does not
    exist here.
    """
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r}: must be one of {', '.join(LAYOUTS)}")
    try:
        return local_ops(numerics, kernels)
    except ValueError as error:
        raise UserError(f"kernels {kernels!r}: {error}") from error
