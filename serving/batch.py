"""Inputs of the programs, built on the host as NumPy arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from dsv41_jax.rows import Rows
from serving.buckets import Bucket, DecodeBatch
from serving.logit_rules import LogitRules
from serving.sampler import Sampling


class Ranked(Protocol):
    """Of a data rank."""

    @property
    def data_rank(self) -> int: ...


Item = TypeVar("Item", bound=Ranked)


@dataclass(frozen=True)
class Segment:
    """Consecutive prompt rows of one request: positions start .. stop-1 of ``tokens``, the
    request's whole prompt.

    floor, decoder_floor, write_from: see ``dsv41_jax.rows.Rows``. image: positions inside image
    spans.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    stop: int
    slot: int
    pages: Sequence[int]
    floor: int = 0
    decoder_floor: int = 0
    write_from: int = 0
    image: frozenset[int] = frozenset()


NOBODY = Segment((), 0, 0, 0, ())


def by_rank(items: Iterable[Item], ranks: int, requests: int) -> list[Item | None]:
    """What stands on the places of a bucket, ``requests`` a data rank: first those of rank 0, then
    None, and so on.
    """
    mine: list[list[Item | None]] = [[] for _ in range(ranks)]
    for item in items:
        mine[item.data_rank].append(item)
    return [item for own in mine for item in own + [None] * (requests - len(own))]


def build_rows(segments: Sequence[Segment], bucket: Bucket, lookback: int) -> Rows:
    """Rows of a bucket from at most ``bucket.requests`` segments of at most ``bucket.rows`` rows;
    the rest is dead.
    """
    b, t = bucket.requests, bucket.rows
    numbers = ("start", "slot", "floor", "decoder_floor", "write_from")
    ints = {name: np.zeros(b, np.int32) for name in (*numbers, "length")}
    tokens, image = np.zeros((b, t), np.int32), np.zeros((b, t), bool)
    previous = np.full((b, lookback), -1, np.int32)
    for i, segment in enumerate(segments):
        length = segment.stop - segment.start
        ints["length"][i] = length
        for name in numbers:
            ints[name][i] = getattr(segment, name)
        tokens[i, :length] = segment.tokens[segment.start : segment.stop]
        if segment.image:
            image[i, :length] = [p in segment.image for p in range(segment.start, segment.stop)]
        for back in range(1, min(lookback, segment.start if length else 0) + 1):
            position = segment.start - back
            previous[i, -back] = -1 if position in segment.image else segment.tokens[position]
    table = page_tables([segment.pages for segment in segments], bucket)
    return Rows(tokens=tokens, image=image, page_table=table, previous=previous, **ints)


def build_targets(segments: Sequence[Segment], bucket: Bucket) -> np.ndarray:
    """int32 [B, T]: the prompt token after each row of the segments, 0 where there is none."""
    targets = np.zeros((bucket.requests, bucket.rows), np.int32)
    for i, segment in enumerate(segments):
        following = segment.tokens[segment.start + 1 : segment.stop + 1]
        targets[i, : len(following)] = following
    return targets


def page_tables(pages: Sequence[Sequence[int]], bucket: Bucket) -> np.ndarray:
    """int32 [B, P], -1 where a request has no page."""
    table = np.full((bucket.requests, bucket.pages), -1, np.int32)
    for i, own in enumerate(pages):
        table[i, : len(own)] = own
    return table


def neutral_decode(count: int, pages: int, stop_ids: int) -> DecodeBatch:
    """A decode batch [count] in which nothing is active."""

    def column(fill: int, *width: int) -> np.ndarray:
        return np.full((count, *width), fill, np.int32)

    return DecodeBatch(
        slot=column(0),
        position=column(0),
        active=np.zeros(count, bool),
        page_table=column(-1, pages),
        floor=column(0),
        decoder_floor=column(0),
        stop_ids=column(-1, stop_ids),
        last_position=column(0),
    )


def everything(rows: int, vocab_size: int) -> np.ndarray:
    """int32 [rows, ceil(V / 32)] of ``LogitRules.allowed``: every id."""
    return np.full((rows, -(-vocab_size // 32)), -1, np.int32)


def neutral_sampling(
    count: int, stop_ids: int, bias_ids: int | None, vocab_size: int | None = None
) -> Sampling:
    """Greedy sampling parameters [count] that report the best ids; rules that change nothing, or
    none if ``bias_ids`` is None. vocab_size: None for rules without ``allowed``.
    """

    def column(fill: float, dtype: type = np.float32, *width: int) -> np.ndarray:
        return np.full((count, *width), fill, dtype)

    rules = None
    if bias_ids is not None:
        rules = LogitRules(
            repetition=column(1),
            frequency=column(0),
            presence=column(0),
            bias_ids=column(-1, np.int32, bias_ids),
            bias=column(0, np.float32, bias_ids),
            stop_ids=column(-1, np.int32, stop_ids),
            min_position=column(0, np.int32),
            allowed=None if vocab_size is None else everything(count, vocab_size),
        )
    return Sampling(
        temperature=column(0),
        top_k=column(0, np.int32),
        top_p=column(1),
        seed=column(0, np.uint32),
        min_p=column(0),
        reports=np.ones(count, bool),
        rules=rules,
    )
