"""One float32 engine that drafts, of eight slots, and its twin without drafts; what is compiled is
shared by all tests.
"""

import pytest

from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from tests.oracle import Oracle
from tests.serving.engine.support import assert_nothing_leaks
from tests.serving.speculative.support import Speculating


@pytest.fixture(scope="session")
def speculating(loaded, tiny_dir, grammars) -> Speculating:
    model, ops = loaded("float32")
    return Speculating(model, ops, Tokenizer.from_dir(tiny_dir, model.cfg), grammars)


@pytest.fixture
def engine(speculating):
    """A fresh engine that drafts; nothing is left in it."""
    engine = speculating.make()
    yield engine
    assert_nothing_leaks(engine)


@pytest.fixture(scope="session")
def plain(speculating) -> Engine:
    """The same programs, but nothing is ever drafted."""
    return speculating.make(max_batch=None)


@pytest.fixture(scope="session")
def oracle(tiny_dir) -> Oracle:
    return Oracle(tiny_dir)
