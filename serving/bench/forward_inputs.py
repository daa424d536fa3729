"""Inputs of measured dispatches, on the host: random tokens, nothing that stops a request."""

from dataclasses import replace
from typing import Any

import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.rows import Rows
from serving.batch import Segment, build_rows, neutral_decode, neutral_sampling, page_tables
from serving.bench.forward_cases import ROOM, Dispatch
from serving.buckets import DecodeBatch
from serving.replay import decoder_floor, window_floor

_STOP_IDS = 1


def program_inputs(cfg: Config, dispatch: Dispatch, replay: bool) -> tuple:
    """What a dispatch's program takes after the cache. Greedy, without logit rules and log
    probabilities.
    """
    sampling = neutral_sampling(dispatch.bucket.requests, _STOP_IDS, None)
    if dispatch.program in ("encode", "replay", "prefill_full"):
        rows = layer_rows(cfg, dispatch, replay)
        return (rows,) if dispatch.program == "encode" else (rows, sampling)
    batch = _decode_batch(dispatch)
    if dispatch.program == "draft":
        return (batch,)
    if dispatch.program == "decode":
        return batch, sampling
    count, drafts = dispatch.bucket.requests, dispatch.bucket.rows - 1
    ids = np.random.default_rng(1).integers(0, cfg.vocab_size, (count, drafts), np.int32)
    return batch, sampling, ids, np.full(count, drafts, np.int32)


def layer_rows(cfg: Config, dispatch: Dispatch, replay: bool) -> Rows:
    """The rows of a dispatch. replay: whether its prompts, if it has some, are replayed."""
    window, segments = cfg.sliding_window, []
    prompt = dispatch.program in ("encode", "replay", "prefill_full")
    for place in dispatch.places:
        rng = np.random.default_rng(place.slot)
        segments.append(
            Segment(
                rng.integers(0, cfg.vocab_size, place.stop, np.int32),
                place.start,
                place.stop,
                place.slot,
                place.pages,
                floor=window_floor(place.hit, window),
                decoder_floor=decoder_floor(dispatch.length, window, replay=replay and prompt),
                write_from=place.hit,
            )
        )
    return build_rows(segments, dispatch.bucket, cfg.engram_max_ngram_size - 1)


def lengths_of(slots: int, plan: list[Dispatch]) -> np.ndarray:
    """int32 [slots] of the tokens that each slot's request has behind it before the first of its
    dispatches; 0 for a slot that is not used.
    """
    lengths = np.zeros(slots, np.int32)
    for dispatch in reversed(plan):
        for place in dispatch.places:
            # The carry of replayed rows was left by ``encode``.
            lengths[place.slot] = place.stop if dispatch.program == "replay" else place.start
    return lengths


def _decode_batch(dispatch: Dispatch) -> DecodeBatch:
    bucket, places = dispatch.bucket, dispatch.places
    first: Any = neutral_decode(bucket.requests, bucket.pages, _STOP_IDS)
    return replace(
        first,
        slot=np.array([place.slot for place in places], np.int32),
        position=np.array([place.start for place in places], np.int32),
        active=np.ones(bucket.requests, bool),
        page_table=page_tables([place.pages for place in places], bucket),
        last_position=np.full(bucket.requests, dispatch.length + ROOM, np.int32),
    )
