"""Sampled arrays on the host."""

from collections.abc import Iterator

import numpy as np

from serving.forwards_speculative import Verified
from serving.request import TokenLogprobs
from serving.sampler import RowScores, Sampled
from serving.scheduler import Chunk
from serving.sequence import Sequence


def host_tokens(
    sampled: Sampled, owners: list[Sequence | None]
) -> list[tuple[Sequence, TokenLogprobs]]:
    """The tokens of one step, of the places that have an owner; waits for the device. A leading
    axis of one step is allowed.
    """
    arrays = [
        np.asarray(a)
        for a in (sampled.token, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
    ]
    if arrays[0].ndim == 2:
        arrays = [array[0] for array in arrays]
    places = [place for place, owner in enumerate(owners) if owner]
    tokens = _tokens(*(array[places] for array in arrays))
    return list(zip(filter(None, owners), tokens, strict=True))


def host_blocks(
    verified: Verified, owners: list[Sequence | None]
) -> list[tuple[Sequence, list[TokenLogprobs], int]]:
    """Of the places that have an owner, the tokens of one step and how many drafts were verified;
    waits for the device.
    """
    sampled = verified.sampled
    leaves = sampled.token, sampled.logprob, sampled.top_ids, sampled.top_logprobs
    columns = [np.asarray(leaf) for leaf in leaves]
    counts, drafted = np.asarray(verified.count).tolist(), np.asarray(verified.drafted).tolist()
    return [
        (owner, list(_tokens(*(column[row, : counts[row]] for column in columns))), drafted[row])
        for row, owner in enumerate(owners)
        if owner
    ]


def prompt_tokens(
    scores: RowScores, chunks: list[Chunk | None]
) -> Iterator[tuple[Chunk, list[TokenLogprobs]]]:
    """Of each place with a chunk, the log probabilities of the prompt tokens that follow its rows;
    waits for the device.
    """
    arrays = [np.asarray(a) for a in (scores.logprob, scores.top_ids, scores.top_logprobs)]
    for row, chunk in enumerate(chunks):
        if chunk is None:
            continue
        following = chunk.sequence.prompt[chunk.start + 1 : chunk.stop + 1]
        logprob, top_ids, top_logprobs = (array[row, : len(following)] for array in arrays)
        yield chunk, list(_tokens(following, logprob, top_ids, top_logprobs))


def _tokens(
    token: np.ndarray, logprob: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> Iterator[TokenLogprobs]:
    columns = (array.tolist() for array in (token, logprob, top_ids, top_logprobs))
    for token_id, value, ids, values in zip(*columns, strict=True):
        yield TokenLogprobs(token_id, value, tuple(zip(ids, values, strict=True)))
