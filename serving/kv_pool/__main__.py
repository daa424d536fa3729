"""Pools of cached pages: ``python -m serving.kv_pool mooncake|show|remove|second-turn|handoff``."""

import argparse
import signal
import sys
import threading

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.errors import UserError
from serving.handoff import bench
from serving.kv_pool import second_turn
from serving.kv_pool.cluster import Cluster, ClusterOptions
from serving.kv_pool.options import parse_bytes
from serving.kv_pool.shm import describe, pool_path, pools


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.kv_pool", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cluster = commands.add_parser("mooncake", help="run a Mooncake master and owners of memory")
    cluster.add_argument("--bytes", default="4GB", metavar="N", help="of each owner")
    cluster.add_argument("--owners", type=int, default=1, metavar="N")
    cluster.add_argument("--host", default="127.0.0.1", help="address that others reach it at")
    cluster.add_argument("--port", type=int, default=0, help="of the master; 0 takes a free one")
    cluster.add_argument("--lease-seconds", type=float, default=10.0, metavar="S")
    cluster.set_defaults(run=_run_cluster)
    show = commands.add_parser("show", help="shared-memory pools of this user")
    show.set_defaults(run=_show)
    remove = commands.add_parser("remove", help="remove a shared-memory pool; engines in it go on")
    remove.add_argument("name")
    remove.set_defaults(run=_remove)
    second_turn.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _run_cluster(arguments: argparse.Namespace) -> None:
    try:
        capacity = parse_bytes(arguments.bytes)
    except ValueError as error:
        raise UserError(f"--bytes: {error}") from None
    if arguments.owners < 1 or not arguments.lease_seconds > 0:
        raise UserError("--owners and --lease-seconds must be positive")
    options = ClusterOptions(
        capacity, arguments.owners, arguments.host, arguments.port, arguments.lease_seconds
    )
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    with Cluster(options) as cluster:
        progress_line(f"--kv-pool mooncake:{cluster.address}")
        while not told.wait(0.2):
            if ended := cluster.ended:
                raise UserError(f"mooncake: {ended} has ended")


def _show(_arguments: argparse.Namespace) -> None:
    for name in pools():
        print(f"{name}  {describe(pool_path(name))}")


def _remove(arguments: argparse.Namespace) -> None:
    path = pool_path(arguments.name)
    if not path.is_file():
        raise UserError(f"{arguments.name}: no such pool, only {', '.join(pools()) or 'none'}")
    path.unlink()


if __name__ == "__main__":
    sys.exit(main())
