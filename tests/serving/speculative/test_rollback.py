"""After any pattern of accepted and rejected drafts, every byte that a later step can read is the
one that plain decoding leaves (ARCHITECTURE section 10, Rollback list).
"""

from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.cache import Cache, CacheShape
from serving.batch import Segment, build_rows, neutral_decode, neutral_sampling
from serving.buckets import Bucket
from serving.programs import Programs
from tests.serving.engine.support import prompt
from tests.serving.speculative.support import LENGTH, OPTIONS, PAGE, SLOTS, WINDOW, readable

PAGES = OPTIONS.pages_per_request
VERIFY, REPLAY = Bucket(SLOTS, 1 + LENGTH, PAGES), Bucket(SLOTS, WINDOW, PAGES)
DRAFT = Bucket(SLOTS, LENGTH, PAGES)
# Positions of both parities, at and around the ends of windows, rings and pages.
LENGTHS = (3, 8, 11, 14, 1, 16, 7, 2)
STEPS = 100
SLOW = pytest.mark.slow


class Steps:
    """Eight requests driven by hand, one a slot: prompts of at most a window, then steps."""

    def __init__(self, programs: Programs):
        self.programs, self.cfg = programs, programs.cfg
        self.pages = [range(slot * PAGES, (slot + 1) * PAGES) for slot in range(SLOTS)]
        self.sampling = neutral_sampling(SLOTS, OPTIONS.max_stop_ids, 300, 512)
        self.sampling.rules.frequency[:] = 0.3
        batch = neutral_decode(SLOTS, PAGES, OPTIONS.max_stop_ids)
        self.batch = replace(
            batch,
            slot=np.arange(SLOTS, dtype=np.int32),
            active=np.ones(SLOTS, bool),
            page_table=np.array(self.pages, np.int32),
            last_position=np.full(SLOTS, PAGES * PAGE - 1, np.int32),
        )

    def start(self, cache: Cache | None = None) -> Cache:
        segments = [
            Segment(prompt(slot, n), 0, n, slot, self.pages[slot]) for slot, n in enumerate(LENGTHS)
        ]
        rows = build_rows(segments, REPLAY, self.cfg.engram_max_ngram_size - 1)
        cache = self.programs("encode", REPLAY, cache or self.programs.new_cache(), rows)
        return self.programs("replay", REPLAY, cache, rows, self.sampling)[0]

    def verify(self, cache: Cache, drafts: np.ndarray, allowed: np.ndarray) -> tuple:
        inputs = self.batch, self.sampling, drafts.astype(np.int32), allowed.astype(np.int32)
        return self.programs("verify", VERIFY, cache, *inputs)

    def snapshot(self, cache: Cache) -> list[dict]:
        """Of every slot, digests of what may be read, and of the block that would be drafted."""
        proposals = self.programs("draft", DRAFT, cache, self.batch)
        host = jax.tree.map(np.asarray, cache)
        found = []
        for slot in range(SLOTS):
            seen = readable(host, slot, self.pages[slot], self.cfg.compress_ratios)
            blocks = (np.asarray(leaf)[slot].tobytes() for leaf in jax.tree.leaves(proposals))
            found.append(seen | {"block": tuple(blocks)})
        return found


@dataclass(frozen=True)
class Plain:
    """Plain decoding: by slot, the tokens from the first one on, and what is readable at each
    position.
    """

    tokens: list[list[int]]
    seen: list[dict[int, dict]]


@pytest.fixture(scope="module", params=["float32", pytest.param("reference", marks=SLOW)])
def steps(request, loaded, speculating) -> Steps:
    if request.param == "float32":
        return Steps(speculating.make().executor.programs)
    options = {"max_stop_ids": OPTIONS.max_stop_ids, "max_bias_ids": OPTIONS.max_bias_ids}
    shape = CacheShape(SLOTS, OPTIONS.pages, PAGE)
    made = Programs(*loaded(request.param), shape, speculation=OPTIONS.speculation, **options)
    one = replace(VERIFY, rows=1)
    for name, bucket in (("encode", REPLAY), ("replay", REPLAY), ("draft", DRAFT)):
        made.compile(name, bucket)
    for bucket in (VERIFY, one):
        made.compile("verify", bucket)
    return Steps(made)


@pytest.fixture(scope="module")
def plain(steps) -> Plain:
    """A row a step, in the bucket of the blocks: rows are bit-equal within a bucket."""
    cache, none = steps.start(), np.zeros((SLOTS, LENGTH))
    tokens = [[int(token)] for token in cache.last_token]
    seen: list[dict[int, dict]] = [{} for _ in range(SLOTS)]
    for step in range(STEPS + 1):
        for slot, found in enumerate(steps.snapshot(cache)):
            seen[slot][LENGTHS[slot] + step] = found
        cache, verified = steps.verify(cache, none, np.zeros(SLOTS))
        assert np.asarray(verified.count).tolist() == [1] * SLOTS
        for slot, token in enumerate(np.asarray(verified.sampled.token)[:, 0].tolist()):
            tokens[slot].append(token)
    return Plain(tokens, seen)


def forced(plain: Plain, done: list[int], accept) -> np.ndarray:
    """Drafts of which each slot, ``done`` tokens behind its first, accepts so many."""
    drafts = np.zeros((SLOTS, LENGTH), int)
    for slot, (made, count) in enumerate(zip(done, accept, strict=True)):
        following = plain.tokens[slot][made + 1 : made + 1 + LENGTH]
        drafts[slot, : len(following)] = following
        drafts[slot, count:] = (drafts[slot, count:] + 1) % 512
    return drafts


def run(steps: Steps, plain: Plain, patterns, cache: Cache | None = None, allowed=None) -> Cache:
    """One verification for each row of ``patterns``, int [rounds, slots], compared after each."""
    cache, done = steps.start(cache), [0] * SLOTS
    for accept in patterns:
        drafts = forced(plain, done, accept)
        limit = np.full(SLOTS, LENGTH) if allowed is None else np.asarray(allowed)
        cache, verified = steps.verify(cache, drafts, limit)
        took = np.minimum(accept, limit)
        assert np.asarray(verified.count).tolist() == [1 + n for n in took]
        done = [made + 1 + n for made, n in zip(done, took, strict=True)]
        for slot, found in enumerate(steps.snapshot(cache)):
            want = plain.seen[slot][LENGTHS[slot] + done[slot]]
            assert {name for name in want if want[name] != found[name]} == set(), (slot, accept)
    return cache


def test_every_two_blocks(steps, plain):
    """All 6^2 pairs of accepted drafts, each in two slots, eight of them side by side."""
    pairs = list(product(range(LENGTH + 1), repeat=2))
    for shift in range(0, len(pairs), 4):
        some = [pairs[(shift + 5 * slot) % len(pairs)] for slot in range(SLOTS)]
        run(steps, plain, np.array(some).T)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW)])
def test_twenty_random_blocks(steps, plain, seed):
    patterns = np.random.default_rng(seed).integers(0, LENGTH + 1, (20, SLOTS))
    patterns = np.where(patterns.cumsum(0) + np.arange(1, 21)[:, None] > STEPS - 6, 0, patterns)
    run(steps, plain, patterns)


def test_over_what_others_left(steps, plain):
    """Slots that other requests ended in mid-block, over NaN in every plane."""
    cache = run(steps, plain, np.full((3, SLOTS), 5))
    poison = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, jnp.nan) if leaf.dtype == jnp.float32 else leaf, cache
    )
    poison = replace(poison, counts=jnp.zeros_like(cache.counts))
    run(steps, plain, np.arange(SLOTS)[None] % 6 * np.ones((4, 1), int), poison)


def test_some_requests_take_fewer_drafts(steps, plain):
    allowed = np.arange(SLOTS) % (LENGTH + 1)
    run(steps, plain, np.full((4, SLOTS), LENGTH), allowed=allowed)


def test_lengths_end_a_block(steps, plain):
    """No row at or beyond last_position: the rest of a page, of another request's say, stays."""
    room = np.arange(SLOTS)
    last = np.array(LENGTHS, np.int32) + room.astype(np.int32)
    ended = Steps(steps.programs)
    ended.batch = replace(steps.batch, last_position=last)
    cache = steps.start()
    before = jax.tree.map(np.array, cache.pools)
    drafts = forced(plain, [0] * SLOTS, [LENGTH] * SLOTS)
    cache, verified = ended.verify(cache, drafts, np.full(SLOTS, LENGTH))
    count = np.minimum(room, 1 + LENGTH)
    np.testing.assert_array_equal(verified.count, count)
    np.testing.assert_array_equal(verified.drafted, np.maximum(count - 1, 0))
    np.testing.assert_array_equal(cache.position, LENGTHS + count)
    for owner, pool in cache.pools.items():
        ratio = steps.cfg.compress_ratios[owner]
        for old, new in zip(jax.tree.leaves(before[owner]), jax.tree.leaves(pool), strict=True):
            old, new = (np.asarray(a).reshape(SLOTS, -1, a.shape[-1]) for a in (old, new))
            for slot in range(SLOTS):
                written = (LENGTHS[slot] + count[slot]) // ratio
                np.testing.assert_array_equal(new[slot, written:], old[slot, written:])


def test_an_inactive_place_changes_nothing(steps):
    cache = steps.start()
    before = jax.tree.map(np.array, cache)
    idle = Steps(steps.programs)
    idle.batch = replace(steps.batch, active=np.zeros(SLOTS, bool))
    cache, verified = idle.verify(cache, np.zeros((SLOTS, LENGTH)), np.full(SLOTS, LENGTH))
    assert not np.asarray(verified.count).any()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(old, new)


def test_single_rows_in_their_own_bucket_give_the_same_tokens(steps, plain):
    cache, one = steps.start(), replace(VERIFY, rows=1)
    for step in range(8):
        inputs = (
            steps.batch,
            steps.sampling,
            np.zeros((SLOTS, 0), np.int32),
            np.zeros(SLOTS, np.int32),
        )
        cache, verified = steps.programs("verify", one, cache, *inputs)
        tokens = np.asarray(verified.sampled.token)[:, 0].tolist()
        assert tokens == [text[step + 1] for text in plain.tokens]
