"""Fixtures and the process-wide settings of every test."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two workers with a thread pool each on two cores slow NumPy down several times.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"

# Workers and repeated runs share compiled programs; the key covers program, options and jaxlib.
# A size limit is what makes JAX lock the folder.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_compilation_cache_max_size", 1_000_000_000)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@cache
def _load(name: str) -> dict[str, np.ndarray]:
    arrays = {}
    with np.load(GOLDENS / name, allow_pickle=False) as file:
        for key in file.files:
            arrays[key] = file[key]
            arrays[key].setflags(write=False)
    return arrays


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], dict[str, np.ndarray]]:
    """``goldens("trace_quant_p37.npz")``: its arrays by key, read-only, loaded once a process."""
    return _load


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The golden tiny checkpoint in the released format."""
    return GOLDENS / "tiny_ckpt"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever reads the golden arrays is a golden test."""
    for item in items:
        if "goldens" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)
