"""Fixtures and the process-wide settings of every test."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two workers with a thread pool each on two cores slow NumPy down several times.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"

# Workers, their processes and repeated runs share compiled programs; the key covers program,
# options and jaxlib. A size limit is what makes JAX lock the folder and note when an entry was
# used: whoever writes without one leaves entries over which JAX 0.10 cannot evict.
COMPILED = {
    "jax_compilation_cache_dir": str(ROOT / ".cache" / "jax"),
    "jax_compilation_cache_max_size": 1_000_000_000,
    "jax_persistent_cache_min_compile_time_secs": 0.3,
}
for option, value in COMPILED.items():
    jax.config.update(option, value)

# Every run has the same examples, so that a failure is the change's own; pytest
# --hypothesis-profile=default looks for new ones.
settings.register_profile("repeated", derandomize=True)
settings.load_profile("repeated")

# Folders whose tests share compiled programs; the order of all, others behind them.
SHARING = "serving", "serving/engine", "serving/speculative", "serving/server", "dsv41_jax"
ORDER = *SHARING, "sharding"


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


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts share compiled programs with all tests."""
    for option, value in COMPILED.items():
        monkeypatch.setenv(option.upper(), str(value))


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The golden tiny checkpoint in the released format."""
    return GOLDENS / "tiny_ckpt"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The largest groups come first; whatever reads the golden arrays is a golden test."""
    items.sort(key=lambda item: [*ORDER, _folder(item.nodeid)].index(_folder(item.nodeid)))
    for item in items:
        if "goldens" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` keeps folders that share compiled programs together, too: two workers
    would compile them at the same time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            if path.endswith("test_on_devices.py"):  # each of them is a process of its own
                return test
            return _folder(nodeid) if _folder(nodeid) in SHARING else path

    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Compiled programs are let go with the folder whose tests share them."""
    folder = _folder(item.nodeid)
    if nextitem is not None and folder in SHARING and folder != _folder(nextitem.nodeid):
        jax.clear_caches()


def _folder(nodeid: str) -> str:
    return nodeid.partition("::")[0].rpartition("/")[0].removeprefix("tests/")
