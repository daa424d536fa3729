"""What the command lines share."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dsv41_jax.errors import UserError


def exit_status(command: Callable[[], None]) -> int:
    """Run a command: 0, or 2 after one ``error:`` line for bad input."""
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def output_file(path: str) -> Iterator[BinaryIO]:
    """A file that appears under ``path`` only once it is whole; UserError at once if it cannot be
    written.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError(f"{path}: cannot be written: is a directory")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def progress_line(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)
