"""Several processes that run one layout together, each with the devices of its host."""

import argparse

import jax

from dsv41_jax.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that can be one of several processes."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 listens, if several processes run the layout; start each of them with"
        " the same options but for its id",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="their number")
    parser.add_argument("--process-id", type=int, default=0, metavar="I", help="from 0 on")


def join(arguments: argparse.Namespace) -> None:
    """Meet the other processes; to be called before any device is used. UserError for options that
    do not go together.
    """
    count, own = arguments.processes, arguments.process_id
    if count < 1 or not 0 <= own < count:
        raise UserError(f"--process-id {own} must be from 0 to {max(count, 1) - 1}")
    if (arguments.coordinator is None) != (count == 1):
        raise UserError("--coordinator and --processes above 1 go together")
    if count > 1:
        jax.distributed.initialize(arguments.coordinator, count, own)
