"""One copy of a model's Engram tables in shared memory for all processes of a host (ARCHITECTURE
9.4), in huge pages where the system gives some.

Tables mapped from the files of a checkpoint are shared as well, through the page cache; but they
lie in small pages there, may be dropped at any time, and nobody has checked their values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsv41_jax.checkpoint.read import value_fault
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.shared_copy import WAIT_S, Planes, SharedCopy, shared_copy
from pallas_kernels.quant import Fp8Rows

DIRECTORY = Path("/dev/shm")
_DTYPES = {"codes": "F8_E4M3", "scales": "F8_E8M0"}


def share_tables(
    model: Model,
    directory: Path = DIRECTORY,
    *,
    wait_s: float = WAIT_S,
    progress: Callable[[str], None] = lambda text: None,
) -> SharedCopy | None:
    """Put the shared copy in place of the Engram tables of a model that was loaded with
    ``engram="host"``; None for a model without any. To be kept while the model is used.

    UserError for values that are not numbers, and as of ``shared_copy``.
    """
    modules = {block.layer.index: block.engram for block in model.layers if block.layer.engram}
    if not modules:
        return None
    planes: dict[str, np.ndarray] = {}
    for layer, module in modules.items():
        table = module.embed()
        if not isinstance(table, Fp8Rows) or not isinstance(table.codes, np.ndarray):
            raise ValueError(f"{layer=}: the Engram table must be on the host")
        planes[f"{layer}.codes"] = np.asarray(table.codes).view(np.uint8)
        planes[f"{layer}.scales"] = np.asarray(table.scales)
    copy = shared_copy(Planes(planes), directory, check=_check, wait_s=wait_s, progress=progress)
    for layer, module in modules.items():
        before = module.embed()
        codes: Any = copy.arrays[f"{layer}.codes"].view(np.asarray(before.codes).dtype)
        scales: Any = copy.arrays[f"{layer}.scales"]
        module.embed.weight.set_value(Fp8Rows(codes, scales))
    return copy


def _check(name: str, start: int, values: np.ndarray) -> None:
    layer, plane = name.split(".")
    fault = value_fault(values, _DTYPES[plane], (start,))
    if fault:
        raise UserError(f"layers.{layer}.engram.embed.weight: {plane}: {fault}")
