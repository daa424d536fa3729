"""OpenAI-compatible server: ``python -m serving.server --checkpoint DIR``."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.process_memory import process_memory
from dsv41_jax.score import default_numerics
from pallas_kernels.dispatch import KINDS
from pallas_kernels.numerics import MODES
from serving.engine import Engine
from serving.generate import ENGRAM_HELP, LAYOUT_HELP, load
from serving.grammars import Grammars
from serving.handoff.options import add_options as add_handoff_options
from serving.handoff.options import handoff_of
from serving.kv_events.publisher import publisher_of
from serving.kv_events.sockets import HELP as EVENTS_HELP
from serving.kv_events.sockets import Endpoint, zmq_module
from serving.kv_pool.connect import check_reachable, namespace_of
from serving.kv_pool.fingerprint import fingerprint
from serving.kv_pool.options import add_option as add_pool_option
from serving.kv_pool.options import parse_pool
from serving.options import EngineOptions
from serving.server.app import create_app
from serving.server.chat import chat_format
from serving.server.limits import ServerOptions
from serving.server.serve import bound_socket, serve
from serving.speculative import add_options, speculation_of
from sharding.all_reduce import HELP as ALL_REDUCE_HELP
from sharding.all_reduce import KINDS as ALL_REDUCES

_KEY_VARIABLE = "DSV41_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DEFAULT_CONTEXT = 32768
_SMALL_CHUNK = 64


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _serve(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.server", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    _add_model_options(parser)
    _add_engine_options(parser)
    _add_http_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numerics", choices=tuple(MODES), help="default: reference on a CPU, serving on a GPU"
    )
    parser.add_argument("--kernels", choices=KINDS, default="auto")
    parser.add_argument("--layout", default="tp1", metavar="NAME", help=LAYOUT_HELP)
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto", help=ALL_REDUCE_HELP)
    parser.add_argument("--engram", default="hbm", metavar="WHERE", help=ENGRAM_HELP)
    parser.add_argument(
        "--chat-format",
        choices=("auto", "v41", "plain"),
        default="auto",
        help="auto: v41 if the tokenizer has V4.1's special tokens, else plain role lines",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens, even")
    parser.add_argument(
        "--pages", type=int, metavar="N", help="of a data rank; default: room for every slot"
    )
    parser.add_argument(
        "--max-running", type=int, default=8, metavar="N", help="slots of a data rank"
    )
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="rows a dispatch")
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"prompt and new tokens of a request; default: up to {_DEFAULT_CONTEXT}",
    )
    parser.add_argument("--prefix-cache", action=flag, default=True)
    parser.add_argument("--swa-bounded-replay", action=flag, default=True)
    parser.add_argument(
        "--prompt-logprobs", action=flag, default=True, help="allow them: a program more a shape"
    )
    add_pool_option(parser)
    add_handoff_options(parser)
    parser.add_argument("--kv-events", metavar="ENDPOINT", help=EVENTS_HELP)
    add_options(parser)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--model-name", action="append", metavar="NAME", help="may be repeated; default: DIR's name"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"or in {_KEY_VARIABLE}, which no process list shows"
    )
    parser.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="waiting requests, then HTTP 429"
    )
    parser.add_argument("--max-body-bytes", type=int, default=8 * 2**20, metavar="N")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="on SIGTERM, for the rest"
    )


def _serve(arguments: argparse.Namespace) -> None:
    _check(arguments)
    config = Config.from_json(Path(arguments.checkpoint) / "config.json")
    options = engine_options(arguments, config)
    endpoint = _events_endpoint(arguments)
    model = fingerprint(arguments.checkpoint)
    if arguments.kv_pool != "none":
        pool = parse_pool(arguments.kv_pool, model)
        check_reachable(pool)
        options = replace(options, kv_pool=pool, handoff=handoff_of(arguments))
    with bound_socket(arguments.host, arguments.port) as sock:
        numerics = default_numerics(arguments.numerics)
        loaded = load(
            arguments.checkpoint,
            numerics,
            kernels=arguments.kernels,
            layout=arguments.layout,
            speculation=options.speculation is not None,
            all_reduce=arguments.all_reduce,
            engram=arguments.engram,
        )
        names = tuple(arguments.model_name or [Path(arguments.checkpoint).resolve().name])
        chat = chat_format(
            arguments.checkpoint,
            loaded.model.cfg,
            loaded.tokenizer,
            arguments.chat_format,
            names[0],
        )
        grammars = Grammars.from_dir(arguments.checkpoint, loaded.model.cfg)
        engine = Engine(
            loaded.model,
            loaded.ops,
            options,
            loaded.tokenizer,
            grammars=grammars,
            placement=loaded.placement,
            peers=loaded.peers,
        )
        engine.warm_up(progress_line)
        if options.speculation is not None and options.speculation.marks:
            progress_line("warning: acceptance is simulated, the answers mean nothing")
        key = arguments.api_key or os.environ.get(_KEY_VARIABLE) or None
        if key is None and arguments.host not in _LOOPBACK:
            progress_line(f"warning: {arguments.host} is open to others and there is no API key")
        limits = ServerOptions(
            names=names,
            api_key=key,
            max_queue=arguments.max_queue,
            max_body_bytes=arguments.max_body_bytes,
            fingerprint=namespace_of(options, engine.executor, model).digest.hex(),
        )
        if endpoint is not None and endpoint.host.strip("[]") not in _LOOPBACK:
            progress_line("warning: --kv-events tells others the tokens of every prompt")
        events = publisher_of(engine, endpoint) if endpoint is not None else None
        memory = process_memory()
        if memory is not None:
            progress_line(f"memory: {memory}")
        serve(create_app(engine, chat, limits, events), sock, arguments.drain_seconds)
        loaded.close()


def _events_endpoint(arguments: argparse.Namespace) -> Endpoint | None:
    """UserError for events that cannot be published."""
    if arguments.kv_events is None:
        return None
    if not (arguments.prefix_cache and arguments.swa_bounded_replay):
        raise UserError("--kv-events: needs --prefix-cache and --swa-bounded-replay")
    zmq_module()
    return Endpoint.parse(arguments.kv_events)


def _check(arguments: argparse.Namespace) -> None:
    """UserError for the first option out of range."""
    least = {"pages": 1, "max_running": 1, "chunk": 1, "max_model_len": 2, "max_queue": 0}
    least |= {"max_body_bytes": 1, "drain_seconds": 0, "port": 0}
    for name, low in least.items():
        value = getattr(arguments, name)
        if value is not None and not value >= low:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    if parse_pool(arguments.kv_pool, "") and not (
        arguments.prefix_cache and arguments.swa_bounded_replay
    ):
        raise UserError("--kv-pool: needs --prefix-cache and --swa-bounded-replay")
    handoff_of(arguments)
    if arguments.page_size < 2 or arguments.page_size % 2:
        raise UserError(f"--page-size {arguments.page_size} must be even and at least 2")


def engine_options(arguments: argparse.Namespace, cfg: Config) -> EngineOptions:
    """The engine's options; few shapes, as each is compiled before the first request."""
    longest = arguments.max_model_len or min(cfg.max_position_embeddings, _DEFAULT_CONTEXT)
    if longest > cfg.max_position_embeddings:
        limit = cfg.max_position_embeddings
        raise UserError(f"--max-model-len {longest} must be at most the model's {limit}")
    per_request = -(-longest // arguments.page_size)
    decode = [1]
    while decode[-1] < arguments.max_running:
        decode.append(min(4 * decode[-1], arguments.max_running))
    chunks = {min(_SMALL_CHUNK, arguments.chunk), arguments.chunk}
    return EngineOptions(
        slots=arguments.max_running,
        pages=arguments.pages or arguments.max_running * per_request,
        page_size=arguments.page_size,
        max_tokens=longest,
        prefill=tuple((1, rows) for rows in sorted(chunks)),
        decode=tuple(decode),
        replay=arguments.swa_bounded_replay,
        prefix_cache=arguments.prefix_cache,
        prompt_logprobs=arguments.prompt_logprobs,
        speculation=speculation_of(arguments),
    )


if __name__ == "__main__":
    sys.exit(main())
