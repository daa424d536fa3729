"""Which rows are run and which tokens are scored, with programs that only say what they were
given.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from serving.quality import scorer as module
from serving.quality.compare import Pairs
from serving.quality.needle import DEPTHS, STATEMENT, needles, recalls
from serving.quality.scorer import Score, Scorer, joined
from serving.quality.studies import Sweep, replay_rows, variant_row, whole
from serving.quality.text import Piece
from serving.quality.variants import Variant
from serving.replay import decoder_floor

WINDOW, VOCAB, LENGTH = 4, 97, 60
WORDS = 90
CFG = SimpleNamespace(sliding_window=WINDOW, vocab_size=VOCAB, engram_max_ngram_size=4)


@dataclass
class Cache:
    """Rows that were run, as (program, slot, position) -> what the row saw."""

    rows: dict = field(default_factory=dict)


class Programs:
    """A token's negative log probability is its id, and the likeliest id is the text's."""

    def __init__(self, model, ops, shape, *, logprobs):
        self.logprobs, self.shape = logprobs, shape

    def new_cache(self):
        return Cache()

    def compile(self, name, bucket):
        pass

    def __call__(self, name, bucket, cache, rows, *inputs):
        assert rows.tokens.shape == (bucket.requests, bucket.rows)
        seen = dict(cache.rows)
        for i, length in enumerate(rows.length):
            for t in range(length):
                position = int(rows.start[i]) + t
                floors = int(rows.floor[i]), int(rows.decoder_floor[i]), int(rows.write_from[i])
                seen[name, int(rows.slot[i]), position] = int(rows.tokens[i, t]), *floors
        cache = Cache(seen)
        if name == "encode":
            return cache
        if name == "replay":
            assert self.logprobs == VOCAB
            ids = np.tile(np.arange(VOCAB)[::-1], (bucket.requests, 1))
            return cache, SimpleNamespace(top_ids=ids, top_logprobs=-ids.astype(np.float32))
        targets = inputs[1]
        scores = SimpleNamespace(
            logprob=-targets.astype(np.float32), top_ids=targets[..., None], top_logprobs=None
        )
        return cache, None, scores


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(module, "Programs", Programs)
    monkeypatch.setattr(module, "copied", lambda cache: cache)
    monkeypatch.setattr("serving.quality.studies.copied", lambda cache: cache)
    return Scorer(SimpleNamespace(cfg=CFG), None, requests=3, length=LENGTH)


@pytest.fixture
def text():
    rng = np.random.default_rng(5)
    return [Piece(rng.integers(1, VOCAB, LENGTH, np.int32), i) for i in range(5)]


def quiet(_line):
    pass


def test_every_token_is_scored_once_and_in_order(made, text):
    scores = whole(made, text, quiet)
    for score, piece in zip(scores, text, strict=True):
        np.testing.assert_array_equal(score.nats, piece.ids[1:])
        np.testing.assert_array_equal(score.best, piece.ids[1:])


def test_a_prompt_is_encoded_then_replayed_then_continued(made, text):
    prompts = [made.trimmed(made.prompt(i, text[i].ids, stop)) for i, stop in enumerate((7, 3, 10))]
    cache = made.encoded(made.new_cache(), prompts)
    cache, scores = made.continued(cache, prompts, [6, 1, 3])
    for i, (stop, count) in enumerate(((7, 6), (3, 1), (10, 3))):
        np.testing.assert_array_equal(scores[i].nats, text[i].ids[stop : stop + count])
        floor = decoder_floor(stop, WINDOW, replay=True)
        own = {key: seen for key, seen in cache.rows.items() if key[1] == i}
        expected = {("encode", i, at): (text[i].ids[at], 0, floor, 0) for at in range(stop)}
        expected |= {
            ("replay", i, at): (text[i].ids[at], 0, floor, 0)
            for at in range(max(stop - WINDOW, 0), stop)
        }
        expected |= {
            ("prefill_scored", i, at): (text[i].ids[at], 0, floor, 0)
            for at in range(stop, stop + count - 1)
        }
        assert own == expected
        assert scores[i].best[0] == VOCAB - 1  # what the replay found likeliest


def test_a_hit_computes_a_window_again_in_another_slot(made, text):
    hit = made.after_hit(made.prompt(1, text[1].ids, 14), 12)
    cache, (score,) = made.scored(made.new_cache(), [hit])
    assert set(cache.rows) == {("prefill_scored", 4, at) for at in range(8, 14)}
    assert {seen[1:] for seen in cache.rows.values()} == {(8, 0, 12)}
    np.testing.assert_array_equal(score.nats, text[1].ids[9:15])
    assert hit.pages == made.prompt(1, text[1].ids, 14).pages


def test_replay_is_compared_on_the_same_tokens(made, text):
    sweep = Sweep.of(WINDOW, made.page, LENGTH - WINDOW)
    assert sweep.lengths[:2] == (4, 5) and sweep.lengths[-1] == 56
    assert all(hit % made.page == 0 and hit > WINDOW for hit in sweep.hits)
    rows = replay_rows(made, text, whole(made, text, quiet), sweep, quiet)
    sides = [(row.variant, row.condition) for row in rows]
    assert sides[0] == ("decoder", "prompt of 4 (exact)")
    assert [condition for _, condition in sides].count("all") == 3
    for row in rows:
        # The same tokens have the same nats here, whatever the program.
        assert row.difference.mean == row.difference.error == 0
        parts = len(sweep.lengths) - 1 if row.variant == "decoder" else len(sweep.hits)
        parts = parts if row.condition == "all" else 1
        assert row.nats.count == parts * len(text) * sweep.count


def test_a_variant_is_compared_where_it_differs(text):
    exact = [Score(p.ids[1:].astype(np.float32), p.ids[1:]) for p in text]
    other = [Score(s.nats + np.where(np.arange(59) < 20, 9, 2), s.best - 1) for s in exact]
    row = variant_row(Variant("s", "v", "c", lambda: None, first=20), other, exact, text)
    assert row.difference.mean == pytest.approx(2) and row.agreement.mean == 0
    assert row.nats.count == 5 * 39
    with pytest.raises(ValueError, match="must be"):
        Pairs().add(exact[0], exact[0][1:], 0)


class Letters:
    """A tokenizer of single characters, and of words above them."""

    def __len__(self):
        return VOCAB

    def knows(self, token_id):
        return True

    def decode(self, ids):
        return " word" if WORDS <= ids[0] < VOCAB - 1 else chr(ids[0])

    def encode(self, text, *, bos=True):
        return [0] * bos + [1 + ord(c) % (VOCAB - 1) for c in text]


def test_needles_have_every_length_and_hide_one_sentence(text):
    tokenizer = Letters()
    pieces = [Piece(np.concatenate([text[0].ids] * 9), 0)]
    made = needles(tokenizer, pieces, 120, WINDOW, DEPTHS)
    assert [n.prompt for n in made] == sorted([*range(120, 120 + WINDOW)] * DEPTHS)
    assert {n.depth for n in made} == set(range(DEPTHS))
    question = tokenizer.encode(STATEMENT, bos=False)
    for needle in made:
        ids, size = needle.ids.tolist(), len(question)
        assert ids[needle.prompt - size : needle.prompt] == question
        places = [i for i in range(needle.prompt - size) if ids[i : i + size] == question]
        assert len(places) == 1
        behind = places[0] + size
        assert ids[behind : behind + needle.answer] == ids[needle.prompt :]
        assert needle.mention == behind
        assert needle.answer == 1 and ids[-1] >= WORDS
        room = needle.prompt - 2 * size - needle.answer - 3
        begins = (places[0] - 1) / (room - 1)
        assert needle.depth / DEPTHS <= begins + 1 / (room - 1)
        assert begins < (needle.depth + 1) / DEPTHS


def test_recall_is_counted_by_depth_and_residue(monkeypatch):
    monkeypatch.setattr(module, "Programs", Programs)
    scorer = Scorer(SimpleNamespace(cfg=CFG), None, requests=3, length=200)
    pieces = [Piece(np.arange(1, 180, dtype=np.int32) % 90 + 1, 0)]
    items = needles(Letters(), pieces, 120, WINDOW, 2)
    found = {recall.condition: recall for recall in recalls(scorer, items, quiet)}
    total = found["all"]
    # The fake replay finds an id that is no word.
    assert (total.recalled.mean, total.exact.mean, total.difference.mean) == (0, 1, -1)
    assert total.nats.mean == pytest.approx(total.exact_nats.mean)
    assert total.first_nats == total.exact_nats  # a token's nats are its id here
    assert {f"residue {r}" for r in range(WINDOW)} < set(found)
    assert sum(r.recalled.count for name, r in found.items() if name[:5] == "depth") == 8


def test_joined_scores_keep_their_order():
    one, two = Score(np.ones(2), np.arange(2)), Score(np.zeros(1), np.arange(5, 6))
    both = joined([one, two])
    assert both.nats.tolist() == [1, 1, 0] and both.best.tolist() == [0, 1, 5]
