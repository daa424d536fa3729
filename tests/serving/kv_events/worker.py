"""Workers with scripted answers that publish what they have cached."""

from pathlib import Path
from typing import Any

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.kv_events.publisher import publisher_of
from serving.kv_events.sockets import Endpoint
from serving.server.app import create_app
from serving.server.chat import chat_format
from tests.serving.server.support import NAME, OPTIONS, Script, Served, scripted_engine

FREE = Endpoint("127.0.0.1", 0)


def publishing_server(directory: Path, script: Script, **executor: Any) -> Served:
    """A server over an engine whose tokens ``script`` gives, and its events; not started."""
    cfg = Config.from_json(directory / "config.json")
    tokenizer = Tokenizer.from_dir(directory, cfg)
    engine = scripted_engine(cfg, tokenizer, script, **executor)
    chat = chat_format(directory, cfg, tokenizer, "plain", NAME)
    return Served(create_app(engine, chat, OPTIONS, publisher_of(engine, FREE)), engine)
