"""A process that serves scripted answers, for tests of its signals."""

import sys
from pathlib import Path

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.server.app import create_app
from serving.server.chat import chat_format
from serving.server.serve import bound_socket, serve
from tests.serving.server.support import NAME, OPTIONS, scripted_engine


def main(directory: Path) -> None:
    cfg = Config.from_json(directory / "config.json")
    tokenizer = Tokenizer.from_dir(directory, cfg)
    engine = scripted_engine(cfg, tokenizer, lambda request: [7] * 4000, step_s=0.03)
    chat = chat_format(directory, cfg, tokenizer, "plain", NAME)
    serve(create_app(engine, chat, OPTIONS), bound_socket("127.0.0.1", 0), drain_s=20)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
