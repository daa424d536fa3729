"""Random numbers of a test."""

import zlib

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of the test's own, the same in every run and order."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
