"""OpenAI front before several workers: ``python -m serving.router --worker URL --worker URL``."""

import argparse
import logging
import os
import re
import sys

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.errors import UserError
from serving.kv_events.sockets import zmq_module
from serving.router.app import create_app
from serving.router.health import Checks
from serving.router.policy import POLICIES, OwnPolicy, Policy, RoundRobin
from serving.router.queued import QueuedPolicy
from serving.router.router import Router, RouterOptions
from serving.routing.score import Weights
from serving.server.limits import ServerOptions
from serving.server.serve import bound_socket, serve

_KEY_VARIABLE = "DSV41_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _serve(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.router", description=__doc__)
    parser.add_argument(
        "--worker", action="append", required=True, metavar="URL", help="may be repeated"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="config.json and tokenizer.json, to turn texts into tokens here; default: by a worker",
    )
    parser.add_argument(
        "--chat-format", choices=("auto", "v41", "plain"), default="auto", help="of the workers"
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="auto: dynamo if ai-dynamo-runtime is installed, else own",
    )
    parser.add_argument(
        "--pool-credit",
        type=float,
        default=0.75,
        metavar="C",
        help="of --policy own: what a token in the pool is worth, 1 being one on the device",
    )
    parser.add_argument(
        "--queue",
        action="store_true",
        help="requests wait here until a rank is about to need them; with --policy own",
    )
    parser.add_argument(
        "--sticky", metavar="HEADER", help="requests with one value of it stay on their data rank"
    )
    _add_http_options(parser)
    return parser


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"of the workers, asked of clients too; or in {_KEY_VARIABLE}; without it workers "
        "with one are refused",
    )
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="other workers before the first byte"
    )
    parser.add_argument("--check-period", type=float, default=2.0, metavar="S")
    parser.add_argument("--check-timeout", type=float, default=5.0, metavar="S")
    parser.add_argument(
        "--check-failures", type=int, default=3, metavar="N", help="in a row, and a worker is down"
    )
    parser.add_argument("--max-body-bytes", type=int, default=8 * 2**20, metavar="N")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="on SIGTERM, for the rest"
    )


def _serve(arguments: argparse.Namespace) -> None:
    _check(arguments)
    key = arguments.api_key or os.environ.get(_KEY_VARIABLE) or None
    policy = make_policy(arguments.policy, arguments.pool_credit, queue=arguments.queue)
    options = RouterOptions(
        workers=tuple(url.rstrip("/") for url in arguments.worker),
        retries=arguments.retries,
        sticky=arguments.sticky,
        checks=Checks(
            arguments.check_period, arguments.check_timeout, arguments.check_failures, key
        ),
    )
    texts = None
    if arguments.checkpoint:
        from serving.router.prompts import LocalTexts

        texts = LocalTexts(arguments.checkpoint, arguments.chat_format)
    if key is None and arguments.host not in _LOOPBACK:
        progress_line(f"warning: {arguments.host} is open to others and there is no API key")
    limits = ServerOptions(names=(), api_key=key, max_body_bytes=arguments.max_body_bytes)
    with bound_socket(arguments.host, arguments.port) as sock:
        _log_to_stderr()
        serve(create_app(Router(options, policy, texts), limits), sock, arguments.drain_seconds)


def make_policy(name: str, pool_credit: float, *, queue: bool = False) -> Policy:
    """The policy of this name; UserError if what it needs is not installed. queue: of ``own``."""
    if queue and name != "own":
        raise UserError(f"--queue: needs --policy own, not {name}")
    if name == "round-robin":
        return RoundRobin()
    zmq_module()
    if name != "own":
        from serving.router.dynamo_policy import DynamoPolicy

        try:
            return DynamoPolicy()
        except UserError:
            if name == "dynamo":
                raise
            progress_line("ai-dynamo-runtime is not installed: --policy own")
    weights = Weights(pool_credit=pool_credit)
    return QueuedPolicy(weights) if queue else OwnPolicy(weights)


def _check(arguments: argparse.Namespace) -> None:
    """UserError for the first option out of range."""
    least = {"retries": 0, "check_failures": 1, "max_body_bytes": 1, "drain_seconds": 0, "port": 0}
    for name, low in least.items():
        value = getattr(arguments, name)
        if not value >= low:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    for name in ("check_period", "check_timeout"):
        if not getattr(arguments, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be over 0")
    if not 0 <= arguments.pool_credit <= 1:
        raise UserError(f"--pool-credit {arguments.pool_credit} must be between 0 and 1")
    urls = [url.rstrip("/") for url in arguments.worker]
    for url in urls:
        if not re.fullmatch(r"https?://[^/?#\s]+", url):
            raise UserError(f"--worker {url} must be http://HOST:PORT")
        if urls.count(url) > 1:
            raise UserError(f"--worker {url} is named twice")


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("serving")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    sys.exit(main())
