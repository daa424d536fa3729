"""The servers of these tests: one over the tiny model a session, and scripted ones."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from serving.grammars import Grammars
from serving.server.app import create_app
from serving.server.chat import chat_format
from tests.serving.engine.support import OPTIONS as ENGINE
from tests.serving.server.support import NAME, OPTIONS, Served, scripted_engine, v41_tokenizer_json


@pytest.fixture(scope="session")
def tiny_server(loaded, tiny_dir, grammars) -> Iterator[Served]:
    """A server over the tiny model in float32."""
    model, ops = loaded("float32")
    tokenizer = Tokenizer.from_dir(tiny_dir, model.cfg)
    options = replace(ENGINE, prefill=((1, 64),), prompt_logprobs=True)
    engine = Engine(model, ops, options, tokenizer, grammars=grammars)
    engine.warm_up()
    chat = chat_format(tiny_dir, model.cfg, tokenizer, "auto", NAME)
    with Served(create_app(engine, chat, OPTIONS), engine) as served:
        yield served


@pytest.fixture
def tiny(tiny_server) -> Iterator[Served]:
    """The same, which compiles nothing while a test uses it; other tests of its process may."""
    tiny_server.engine.compiles.start()
    yield tiny_server
    assert tiny_server.engine.compiles.count == 0


@pytest.fixture(scope="session")
def v41_dir(tiny_dir, tmp_path_factory):
    """The tiny checkpoint's config beside a tokenizer with V4.1's special tokens."""
    directory = tmp_path_factory.mktemp("v41")
    (directory / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    plain = (tiny_dir / "tokenizer.json").read_text("utf-8")
    (directory / "tokenizer.json").write_text(v41_tokenizer_json(plain), "utf-8")
    return directory


@pytest.fixture
def scripted(tiny_dir, v41_dir):
    """``scripted(script, v41=True, options=..., **of the executor)``: a server, not started."""

    def make(script=lambda request: [], *, v41=False, options=OPTIONS, drain_s=10.0, **executor):
        directory = v41_dir if v41 else tiny_dir
        cfg = Config.from_json(directory / "config.json")
        tokenizer = Tokenizer.from_dir(directory, cfg)
        engine = scripted_engine(cfg, tokenizer, script, **executor)
        engine.grammars = Grammars.from_dir(directory, cfg)
        chat = chat_format(directory, cfg, tokenizer, "auto", NAME)
        return Served(create_app(engine, chat, options), engine, drain_s)

    return make
