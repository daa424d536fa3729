"""What the command lines share."""

import os
import sys
import tempfile
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
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        Path(name).unlink(missing_ok=True)


def progress_line(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)
