"""One float32 engine on the golden checkpoint for all tests; its twins share its executables."""

import pytest

from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from tests.oracle import Oracle
from tests.serving.engine.support import Engines, assert_nothing_leaks


@pytest.fixture(scope="session")
def engines(loaded, tiny_dir, grammars) -> Engines:
    model, ops = loaded("float32")
    return Engines(model, ops, Tokenizer.from_dir(tiny_dir, model.cfg), grammars)


@pytest.fixture(scope="session")
def shared_engine(engines) -> Engine:
    return engines.make()


@pytest.fixture
def engine(shared_engine):
    """The shared engine, empty; whatever a test does, nothing is left in it."""
    shared_engine.ranks[0].cache.clear()
    yield shared_engine
    vars(shared_engine.ranks[0]).pop("plan", None)
    assert_nothing_leaks(shared_engine)


@pytest.fixture(scope="session")
def oracle(tiny_dir) -> Oracle:
    return Oracle(tiny_dir)
