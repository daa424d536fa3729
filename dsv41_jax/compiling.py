"""How every program of this project is compiled."""

from collections.abc import Callable
from typing import Any

import jax

# XLA drops a rounding to bf16 whose result is widened again, and with it the reference's own
# arithmetic: by default everywhere, and on a CPU once more in the fusions that
# it hands to YNNPACK.
COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_cpu_experimental_ynn_fusion_type": "",
}


def jit(function: Callable, *, donate: tuple[int, ...] = (), static: tuple[int, ...] = ()) -> Any:
    """``jax.jit`` that keeps every rounding; donated and static arguments by position."""
    return jax.jit(
        function, donate_argnums=donate, static_argnums=static, compiler_options=COMPILER_OPTIONS
    )
