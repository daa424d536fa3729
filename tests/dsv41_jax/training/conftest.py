"""Programs that are compiled quickly rather than well."""

import pytest

from dsv41_jax import compiling


@pytest.fixture(scope="package", autouse=True)
def quick_compiling():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compiling.COMPILER_OPTIONS, "xla_backend_optimization_level", 0)
        yield
