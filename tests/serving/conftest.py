"""One set of compiled programs a session: compiling is most of these tests' time."""

from functools import cache

import numpy as np
import pytest

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.config import Config
from pallas_kernels.numerics import Numerics
from serving.grammars import Grammars
from serving.programs import Programs
from sharding.build import build_ops
from tests.serving.support import SHAPE, STOP_IDS, VOCAB, Bench, MakeBench


@pytest.fixture(scope="session")
def loaded(tiny_dir):
    """Model and operations of the tiny checkpoint, by name of the numerics."""

    @cache
    def load(name):
        numerics = Numerics.named(name)
        return load_model(tiny_dir, numerics=numerics), build_ops("tp1", numerics, "reference")

    return load


@pytest.fixture(scope="session")
def benches(loaded) -> MakeBench:
    """The bench of a name of the numerics; every log probability is returned."""

    @cache
    def bench(name):
        model, ops = loaded(name)
        return Bench(Programs(model, ops, SHAPE, logprobs=VOCAB, max_stop_ids=STOP_IDS))

    return bench


@pytest.fixture(scope="session")
def bench(benches) -> Bench:
    return benches("float32")


@pytest.fixture(scope="session")
def grammars(tiny_dir):
    """Grammars of the tiny checkpoint's tokenizer."""
    made = Grammars.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """96 token ids behind a BOS, without an end of sequence."""
    return np.concatenate([[0], np.random.default_rng(11).integers(3, 500, 95)])
