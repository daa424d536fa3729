"""`python -m serving.bench agentx | check | forward | generate | overhead | sampling | serve`."""

import argparse
import sys

from dsv41_jax.command import exit_status
from serving.bench import agentx, check, forward, generate, overhead, sampling, serve


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (agentx, check, forward, generate, overhead, sampling, serve):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    return exit_status(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
