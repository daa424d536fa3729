"""Layout -> mesh of the devices at hand."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax.errors import UserError
from sharding.layouts import Layout


def make_mesh(layout: Layout, devices: Sequence | None = None) -> Mesh:
    """A mesh data x model of the first devices (default: of all processes), tensor ranks next to
    one another; UserError if there are too few, or if a process would have none.
    """
    found = jax.devices() if devices is None else devices
    if len(found) < layout.devices:
        raise UserError(
            f"layout {layout.name}: needs {layout.devices} devices, {len(found)}"
            f" {found[0].device_kind} {'is' if len(found) == 1 else 'are'} here"
        )
    used = list(found)[: layout.devices]
    idle = {device.process_index for device in found} - {device.process_index for device in used}
    if idle:
        raise UserError(
            f"layout {layout.name}: {layout.devices} of {len(found)} devices leave process"
            f" {min(idle)} without any"
        )
    shape = layout.mesh_shape
    return Mesh(np.array(used).reshape(*shape.values()), tuple(shape))
