"""Held-out text as pieces of one length."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv41_jax.errors import UserError
from dsv41_jax.prompt import read_text
from dsv41_jax.tokenizer import Tokenizer

HELD_OUT = "held_out.txt"
BREAK = "\f"
ENOUGH = 8  # documents from which on they are the clusters


@dataclass(frozen=True)
class Piece:
    """ids int32 [length], a BOS first. Statistics take pieces of one cluster as dependent."""

    ids: np.ndarray
    cluster: int


def text_file(checkpoint: str, given: str | None) -> str:
    """The file of ``--text``, or the one that the checkpoint brings along; UserError without
    either.
    """
    if given is not None:
        return given
    own = Path(checkpoint) / HELD_OUT
    if not own.is_file():
        raise UserError(f"{own}: is missing; --text FILE names another text")
    return str(own)


def documents(text: str) -> list[str]:
    """Documents of a text: a line that begins with a form feed opens one and is no part of it."""
    first, *others = f"\n{text}".split(f"\n{BREAK}")
    bodies = [first.removeprefix("\n"), *(other.partition("\n")[2] for other in others)]
    return [body for body in bodies if body.strip()]


def pieces(path: str, tokenizer: Tokenizer, length: int, limit: int) -> list[Piece]:
    """At most ``limit`` pieces of ``length`` ids: the first of each document, then the second ones.
    UserError if no document is that long.
    """
    cut = [_cut(tokenizer.encode(body), length) for body in documents(read_text(path))]
    found = [(number, ids) for number, ids in _in_turn(cut)][:limit]
    if not found:
        longest = max((sum(map(len, own)) for own in cut), default=0)
        raise UserError(f"{path}: no document has {length} tokens (longest: {longest})")
    clustered = len({number for number, _ in found}) >= ENOUGH
    return [
        Piece(np.asarray(ids, np.int32), number if clustered else place)
        for place, (number, ids) in enumerate(found)
    ]


def _cut(ids: list[int], length: int) -> list[list[int]]:
    """Consecutive pieces, each behind the document's BOS; the rest is left out."""
    bos, body, size = ids[0], ids[1:], length - 1
    return [[bos, *body[i : i + size]] for i in range(0, len(body) - size + 1, size)]


def _in_turn(cut: list[list[list[int]]]) -> Iterator[tuple[int, list[int]]]:
    for turn in range(max(map(len, cut), default=0)):
        for number, own in enumerate(cut):
            if turn < len(own):
                yield number, own[turn]
