"""The golden tiny model as fixtures."""

import pytest

from tests.dsv41_jax.support import Tiny, tiny


@pytest.fixture(scope="session")
def float32() -> Tiny:
    return tiny("float32")


@pytest.fixture(scope="session")
def reference() -> Tiny:
    return tiny("reference")
