"""A sentence hidden in held-out text, asked for at its end: every residue of the prompt's length,
several depths.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.quality.scorer import Score, Scorer
from serving.quality.statistics import Estimate, estimate
from serving.quality.studies import Progress, batches
from serving.quality.text import Piece

DEPTHS = 8
_WORD = re.compile(r" [a-z]{4,}")
STATEMENT = "\n\nThe access code of the server is"


@dataclass(frozen=True)
class Needle:
    """ids int32: prompt and answer; prompt: tokens of the prompt. depth: which eighth of the text
    in front of the question holds the sentence, ``mention`` where its answer begins. cluster: that
    of the piece around it.
    """

    ids: np.ndarray
    prompt: int
    depth: int
    mention: int
    cluster: int

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True)
class Recall:
    """Of prompts with these residues and depths: whether the whole answer is the likeliest, and
    nats of an answer token, by replay and by the exact model; first_nats: of the same token in the
    sentence, before anything told it.
    """

    condition: str
    recalled: Estimate
    exact: Estimate
    difference: Estimate
    nats: Estimate
    exact_nats: Estimate
    first_nats: Estimate


def needles(
    tokenizer: Tokenizer, pieces: Sequence[Piece], length: int, window: int, each: int
) -> list[Needle]:
    """``each`` prompts of every length from ``length`` to ``length + window - 1``, at depths that
    change from one to the next. UserError if the text is too short for them.
    """
    question, words = tokenizer.encode(STATEMENT, bos=False), _words(tokenizer)
    made, rng = [], np.random.default_rng(0)
    for number in range(each * window):
        prompt, piece = length + number // each, pieces[number % len(pieces)]
        answer = [int(rng.choice(words))]
        sentence = [*question, *answer, *tokenizer.encode(".\n\n", bos=False)]
        room = prompt - len(sentence) - len(question)
        if not 1 < room <= len(piece.ids):
            raise UserError(f"needle of {prompt} tokens: the text must have {room} and at least 2")
        depth = (number + number // each) % DEPTHS
        at = 1 + int((depth + rng.random()) / DEPTHS * (room - 1))
        hay = piece.ids[:room].tolist()
        ids = [*hay[:at], *sentence, *hay[at:], *question, *answer]
        mention = at + len(question)
        made.append(Needle(np.asarray(ids, np.int32), prompt, depth, mention, piece.cluster))
    return made


def _words(tokenizer: Tokenizer) -> list[int]:
    """Ids that are a whole word behind a blank: an answer is one of them. UserError without any."""
    ids = [i for i in range(len(tokenizer)) if tokenizer.knows(i)]
    words = [i for i in ids if _WORD.fullmatch(tokenizer.decode([i]))]
    if not words:
        raise UserError("needle: the tokenizer has no token that is a word of four letters or more")
    return words


def recalls(scorer: Scorer, items: Sequence[Needle], progress: Progress) -> list[Recall]:
    """Recall in all, by depth and by residue of the prompt's length."""
    found_of: list[tuple[Score, Score, Score]] = []
    for batch in batches(items, scorer.requests):
        progress(f"{len(found_of)} of {len(items)} prompts")
        replayed, exact = _replayed(scorer, batch), _exact(scorer, batch)
        found_of += [(own, *both) for own, both in zip(replayed, exact, strict=True)]
    found = [_recall("all", items, found_of, range(len(items)))]
    for depth in range(DEPTHS):
        places = [i for i, item in enumerate(items) if item.depth == depth]
        found.append(_recall(f"depth {depth + 1} of {DEPTHS}", items, found_of, places))
    for residue in range(scorer.window):
        places = [i for i, item in enumerate(items) if item.prompt % scorer.window == residue]
        found.append(_recall(f"residue {residue}", items, found_of, places))
    return [recall for recall in found if recall is not None]


def _replayed(scorer: Scorer, batch: Sequence[Needle]) -> list[Score]:
    prompts = [scorer.trimmed(scorer.prompt(i, n.ids, n.prompt)) for i, n in enumerate(batch)]
    cache = scorer.encoded(scorer.new_cache(), prompts)
    return scorer.continued(cache, prompts, [n.answer for n in batch])[1]


def _exact(scorer: Scorer, batch: Sequence[Needle]) -> list[tuple[Score, Score]]:
    """Scores of the answers, and of the first mentions."""
    prompts = [scorer.prompt(i, n.ids, len(n.ids) - 1) for i, n in enumerate(batch)]
    _, scores = scorer.scored(scorer.new_cache(), prompts)
    return [
        (score[n.prompt - 1 :], score[n.mention - 1 : n.mention - 1 + n.answer])
        for score, n in zip(scores, batch, strict=True)
    ]


def _recall(
    condition: str,
    items: Sequence[Needle],
    found_of: Sequence[tuple[Score, Score, Score]],
    places: Sequence[int],
) -> Recall | None:
    if not len(places):
        return None
    by_side = []
    for side in (0, 1, 2):
        scores = [(found_of[i][side], items[i].ids[items[i].prompt :]) for i in places]
        right = np.array([bool(np.all(score.best == answer)) for score, answer in scores])
        nats = np.array([score.nats.mean() for score, _ in scores])
        by_side.append((right.astype(float), nats))
    (right, nats), (exact, exact_nats), (_, first_nats) = by_side
    own = np.array([items[i].cluster for i in places])
    return Recall(
        condition,
        *(estimate(v, own) for v in (right, exact, right - exact, nats, exact_nats, first_nats)),
    )
