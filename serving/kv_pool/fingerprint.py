"""Which checkpoint pages belong to, without reading all of it."""

import hashlib
from pathlib import Path

from dsv41_jax.errors import UserError

_EVERY = 4 * 2**20
_FEWEST = 16
_SAMPLE = 256
# What a checkpoint says but its pages do not depend on.
_OTHER = (".md", ".py", ".jinja", ".lock", ".gitattributes")


def fingerprint(checkpoint: str | Path) -> str:
    """Hexadecimal digest of a checkpoint directory: names and sizes of its files, and ``_SAMPLE``
    bytes out of every ``_EVERY``, at least ``_FEWEST`` times a file (small files whole).

    A copy elsewhere has the same one. Two checkpoints that differ in less than a few megabytes of
    one file may share it: no released or trained checkpoint does.
    """
    root = Path(checkpoint)
    files = sorted(f for f in root.rglob("*") if f.is_file() and f.suffix not in _OTHER)
    if not files:
        raise UserError(f"{root} has no files")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(root).as_posix()}\0{size}\0".encode())
        step = max(min(_EVERY, size // _FEWEST), _SAMPLE)
        with file.open("rb") as opened:
            for offset in range(0, size, step):
                opened.seek(offset)
                digest.update(opened.read(_SAMPLE))
            opened.seek(max(size - _SAMPLE, 0))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()
