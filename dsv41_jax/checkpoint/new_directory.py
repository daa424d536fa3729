"""Write a directory whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv41_jax.errors import UserError


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `target` that becomes `target` when the block succeeds.

    On any exception nothing is left behind. UserError if `target` holds anything, is a file, or
    cannot be written, also when the disk fills up midway.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; the output must be a new or empty directory")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target}: is not empty; the output must be a new or empty directory")
    target = target.absolute()
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        yield work
        _open_up(work)
        os.replace(work, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open_up(work: Path) -> None:
    """Give the directory and its files the usual modes; temporary files start private."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (work, *work.iterdir()):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
