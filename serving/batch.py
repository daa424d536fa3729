"""Rows of a batch, built on the host as NumPy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41_jax.rows import Rows
from serving.programs import Bucket
from serving.request import Request
from serving.sampler import Sampling


@dataclass(frozen=True)
class Segment:
    """Consecutive prompt rows of one request: positions start .. stop-1 of ``tokens``, the
    request's whole prompt.

    floor, decoder_floor, write_from: see ``dsv41_jax.rows.Rows``. image: positions inside image
    spans.
    """

    tokens: Sequence[int]
    start: int
    stop: int
    slot: int
    pages: Sequence[int]
    floor: int = 0
    decoder_floor: int = 0
    write_from: int = 0
    image: frozenset[int] = frozenset()


def build_rows(segments: Sequence[Segment], bucket: Bucket, lookback: int) -> Rows:
    """Rows of a bucket from at most ``bucket.requests`` segments of at most ``bucket.rows`` rows;
    the rest is dead.
    """
    b, t = bucket.requests, bucket.rows
    ints = {
        name: np.zeros(b, np.int32)
        for name in ("start", "length", "slot", "floor", "decoder_floor", "write_from")
    }
    tokens, image = np.zeros((b, t), np.int32), np.zeros((b, t), bool)
    previous = np.full((b, lookback), -1, np.int32)
    for i, segment in enumerate(segments):
        length = segment.stop - segment.start
        ints["length"][i] = length
        for name in ("start", "slot", "floor", "decoder_floor", "write_from"):
            ints[name][i] = getattr(segment, name)
        tokens[i, :length] = segment.tokens[segment.start : segment.stop]
        image[i, :length] = [p in segment.image for p in range(segment.start, segment.stop)]
        for back in range(1, min(lookback, segment.start) + 1):
            position = segment.start - back
            previous[i, -back] = -1 if position in segment.image else segment.tokens[position]
    table = page_tables([segment.pages for segment in segments], bucket)
    return Rows(tokens=tokens, image=image, page_table=table, previous=previous, **ints)


def page_tables(pages: Sequence[Sequence[int]], bucket: Bucket) -> np.ndarray:
    """int32 [B, P], -1 where a request has no page."""
    table = np.full((bucket.requests, bucket.pages), -1, np.int32)
    for i, own in enumerate(pages):
        table[i, : len(own)] = own
    return table


def build_sampling(requests: Sequence[Request], bucket: Bucket) -> Sampling:
    """Sampling parameters of a bucket; places without a request are greedy."""

    def column(values: list, fill: float, dtype: type) -> np.ndarray:
        return np.array(values + [fill] * (bucket.requests - len(values)), dtype)

    return Sampling(
        temperature=column([r.temperature for r in requests], 0, np.float32),
        top_k=column([r.top_k for r in requests], 0, np.int32),
        top_p=column([r.top_p for r in requests], 1, np.float32),
        seed=column([r.seed for r in requests], 0, np.uint32),
    )
