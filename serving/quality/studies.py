"""Studies on held-out text; each compares with the exact model on the same tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsv41_jax.cache import Cache
from serving.batch import Segment
from serving.quality.compare import Pairs, Row
from serving.quality.scorer import Score, Scorer, copied
from serving.quality.text import Piece
from serving.quality.variants import Variant

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sweep:
    """Positions where replay is measured. lengths: of prompts, replay on the decoder's side. hits:
    cached tokens, whole pages; the prompt is ``new`` tokens longer. count: tokens scored behind.
    """

    lengths: tuple[int, ...]
    hits: tuple[int, ...]
    new: int
    count: int

    @classmethod
    def of(cls, window: int, page: int, context: int) -> "Sweep":
        """Prompts from a window (where replay is exact) and one token more up to ``context``."""
        grown = (
            window + window * part // 4 + 1 for part in (0, 1, 2, 4, 8, 12, 20, 28, 44, 60, 92)
        )
        lengths = (window, *(length for length in grown if length < context), context)
        hits = (page * pages for pages in (2, 3, 4, 8, 16, 24, 30))
        return cls(
            lengths, tuple(hit for hit in hits if hit <= context - window), window // 4, window
        )


def whole(scorer: Scorer, pieces: Sequence[Piece], progress: Progress) -> list[Score]:
    """Scores of all tokens of the pieces but the first: every row through every layer."""
    found = []
    for batch in batches(pieces, scorer.requests):
        progress(f"{len(found)} of {len(pieces)} pieces")
        prompts = [scorer.prompt(i, p.ids, len(p.ids) - 1) for i, p in enumerate(batch)]
        found += scorer.scored(scorer.new_cache(), prompts)[1]
    return found


def variant_row(
    variant: Variant,
    scores: Sequence[Score],
    exact: Sequence[Score],
    pieces: Sequence[Piece],
) -> Row:
    """A variant's scores of whole pieces beside the exact ones."""
    pairs, rows = Pairs(), slice(variant.first, None)
    for score, true, piece in zip(scores, exact, pieces, strict=True):
        pairs.add(score[rows], true[rows], piece.cluster)
    return pairs.row(variant.study, variant.name, variant.condition)


def replay_rows(
    scorer: Scorer,
    pieces: Sequence[Piece],
    exact: Sequence[Score],
    sweep: Sweep,
    progress: Progress,
) -> list[Row]:
    """Rows of both sides of replay, alone and together, at every position and in all."""
    found: dict[tuple[str, int], Pairs] = {}
    done = 0
    for batch, true in zip(
        batches(pieces, scorer.requests), batches(exact, scorer.requests), strict=True
    ):

        def begun(stop: int, done: int = done) -> None:
            progress(f"{done} of {len(pieces)} pieces, up to token {stop}")

        for side, at, first, scores in _replayed(scorer, batch, sweep, begun):
            pairs = found.setdefault((side, at), Pairs())
            for score, own, piece in zip(scores, true, batch, strict=True):
                # Scores begin with the second token.
                pairs.add(score, own[first - 1 : first - 1 + sweep.count], piece.cluster)
        done += len(batch)
    return _rows(found, scorer.window)


def _replayed(
    scorer: Scorer, batch: Sequence[Piece], sweep: Sweep, begun: Callable[[int], None]
) -> Iterator[tuple[str, int, int, list[Score]]]:
    """Side, position, first token scored and the scores of ``sweep.count`` tokens from there on."""
    cache = scorer.new_cache()
    at, prompts = 0, [scorer.prompt(i, piece.ids, 0) for i, piece in enumerate(batch)]
    for stop in sorted({*sweep.lengths, *sweep.hits}):
        begun(stop)
        prompts = [replace(p, start=at, stop=stop) for p in prompts]
        cache, at = scorer.encoded(cache, prompts), stop
        if stop in sweep.lengths:
            trimmed = [scorer.trimmed(p) for p in prompts]
            counts = [sweep.count] * len(batch)
            yield "decoder", stop, stop, scorer.continued(copied(cache), trimmed, counts)[1]
        if stop in sweep.hits:
            hit = [scorer.after_hit(p, stop) for p in prompts]
            longer = [replace(p, stop=stop + sweep.count) for p in hit]
            scores = scorer.scored(copied(cache), longer)[1]
            yield "encoder", stop, stop + 1, [score[-sweep.count :] for score in scores]
            yield "both", stop, stop + sweep.new, _after_hit(scorer, copied(cache), hit, sweep)


def _after_hit(scorer: Scorer, cache: Cache, hit: list[Segment], sweep: Sweep) -> list[Score]:
    prompts = [scorer.trimmed(replace(p, stop=p.stop + sweep.new)) for p in hit]
    counts = [sweep.count] * len(prompts)
    return scorer.continued(scorer.encoded(cache, prompts), prompts, counts)[1]


def _rows(found: dict[tuple[str, int], Pairs], window: int) -> list[Row]:
    rows = []
    for side in ("decoder", "encoder", "both"):
        own = {at: pairs for (which, at), pairs in sorted(found.items()) if which == side}
        total, kind = Pairs(), "prompt of" if side == "decoder" else "hit of"
        for at, pairs in own.items():
            exact = at <= window
            rows.append(pairs.row("replay", side, f"{kind} {at}" + " (exact)" * exact))
            if not exact:
                total.extend(pairs)
        if total.clusters:
            rows.append(total.row("replay", side, "all"))
    return rows


def batches(items: Sequence, size: int) -> Iterator[Sequence]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def accuracy(scores: Sequence[Score], pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Whether the likeliest id is the text's, [n], and the clusters."""
    same = [s.best == p.ids[1:] for s, p in zip(scores, pieces, strict=True)]
    clusters = [np.full(own.size, p.cluster) for own, p in zip(same, pieces, strict=True)]
    return np.concatenate(same), np.concatenate(clusters)
