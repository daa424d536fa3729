"""A bench for the compiled programs: several requests of unequal length in one cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import Cache, CacheShape
from serving.batch import Segment, build_rows, neutral_sampling, page_tables
from serving.programs import Bucket, DecodeBatch, Decoded, Programs
from serving.request import Request
from serving.sampler import Sampled, Sampling

# Slots and pages differ from every other extent, so that a cache array's shape in HLO is its own.
PLACES, SLOTS, PAGE, PAGES, POOL = 4, 6, 16, 8, 49
SHAPE = CacheShape(slots=SLOTS, pages=POOL, page_size=PAGE)
WINDOW, VOCAB, STOP_IDS = 16, 512, 4
WIDE, NARROW, SINGLE = 64, 16, 1
NOBODY = Segment((), 0, 0, 0, ())


def bucket(rows: int, steps: int = 1) -> Bucket:
    return Bucket(PLACES, rows, PAGES, steps)


ENCODE = [("encode", bucket(rows)) for rows in (WIDE, NARROW, SINGLE)]
REPLAY, FULL = ("replay", bucket(WINDOW)), ("prefill_full", bucket(WIDE))
DECODE, DECODE4 = ("decode", bucket(1)), ("decode", bucket(1, steps=4))
EVERY_PROGRAM = [*ENCODE, REPLAY, FULL, DECODE, DECODE4]


def build_sampling(requests: Sequence[Request], bucket: Bucket) -> Sampling:
    """Sampling parameters of a bucket without rules; places without a request are greedy."""
    sampling = neutral_sampling(bucket.requests, 0, None)
    for i, request in enumerate(requests):
        for name in ("temperature", "top_k", "top_p", "seed", "min_p"):
            getattr(sampling, name)[i] = getattr(request, name)
    return sampling


def request(
    tokens: Sequence[int], slot: int, pages: Sequence[int] | None = None, **floors: int
) -> Segment:
    """A whole prompt; its pages are those of the slot's own range unless given."""
    own = range(slot * PAGES, (slot + 1) * PAGES) if pages is None else pages
    return Segment(tuple(map(int, tokens)), 0, len(tokens), slot, tuple(own), **floors)


def trimmed(segment: Segment) -> Segment:
    """The request under decoder-side replay."""
    return replace(segment, decoder_floor=max(segment.stop - WINDOW, 0))


@dataclass(frozen=True)
class Step:
    """Sampled tokens int [B] and the log probabilities float32 [B, V] of every id, by id."""

    token: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of(cls, sampled: Sampled) -> "Step":
        ids, values = np.asarray(sampled.top_ids), np.asarray(sampled.top_logprobs)
        logprobs = np.full(ids.shape, np.nan, np.float32)
        np.put_along_axis(logprobs, ids, values, axis=-1)
        token = np.asarray(sampled.token)
        picked = np.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]
        np.testing.assert_array_equal(picked, np.asarray(sampled.logprob))
        return cls(token, logprobs)

    def place(self, index: int) -> "Step":
        return Step(self.token[index], self.logprobs[index])


def stacked(steps: Sequence[Step]) -> Step:
    """Steps as one, [steps, B]."""
    return Step(np.stack([s.token for s in steps]), np.stack([s.logprobs for s in steps]))


def assert_bits_equal(a: Step, b: Step) -> None:
    np.testing.assert_array_equal(a.token, b.token)
    assert np.isfinite(a.logprobs).all()
    assert a.logprobs.tobytes() == b.logprobs.tobytes()


def assert_close(a: Step, b: Step, tolerance: float) -> None:
    np.testing.assert_array_equal(a.token, b.token)
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=tolerance)


class Bench:
    """Programs of a few buckets over one model, each compiled when it is first used."""

    def __init__(self, programs: Programs):
        self.programs, self.cfg = programs, programs.cfg
        self.lookback = programs.cfg.engram_max_ngram_size - 1

    def new_cache(self) -> Cache:
        return self.programs.new_cache()

    def executable(self, program: tuple[str, Bucket]) -> jax.stages.Compiled:
        return self.programs.compile(*program)

    def call(self, program: tuple[str, Bucket], cache: Cache, *inputs: object) -> object:
        self.programs.compile(*program)
        return self.programs(*program, cache, *inputs)

    def rows(self, segments: Sequence[Segment], count: int) -> object:
        return build_rows(segments, bucket(count), self.lookback)

    def encode(self, cache: Cache, segments: Sequence[Segment], count: int) -> Cache:
        return self.call(("encode", bucket(count)), cache, self.rows(segments, count))

    def encode_prompts(
        self, cache: Cache, prompts: Sequence[Segment], chunks: Sequence[int], count: int
    ) -> Cache:
        """Every prompt in chunks of its own size."""
        for batch in _chunked(prompts, chunks):
            cache = self.encode(cache, batch, count)
        return cache

    def replay(self, cache: Cache, prompts: Sequence[Segment]) -> tuple[Cache, Step]:
        tails = [replace(p, start=max(p.stop - WINDOW, 0)) for p in prompts]
        rows, sampling = self.rows(tails, WINDOW), build_sampling([], bucket(WINDOW))
        cache, sampled = self.call(REPLAY, cache, rows, sampling)
        return cache, Step.of(sampled)

    def full(
        self, cache: Cache, prompts: Sequence[Segment], chunks: Sequence[int] | None = None
    ) -> tuple[Cache, Step]:
        """All layers on every row; the step of each prompt's last chunk."""
        chunks = chunks or [WIDE] * len(prompts)
        sampling = build_sampling([], bucket(WIDE))
        last: list[Step] = [Step(np.int32(0), np.zeros(VOCAB, np.float32))] * PLACES
        for batch in _chunked(prompts, chunks):
            cache, sampled = self.call(FULL, cache, self.rows(batch, WIDE), sampling)
            step = Step.of(sampled)
            for i, part in enumerate(batch):
                if part.start < part.stop:
                    last[i] = step.place(i)
        return cache, stacked(last)

    def prompt(
        self,
        cache: Cache,
        prompts: Sequence[Segment],
        chunks: Sequence[int] | None = None,
        count: int = WIDE,
    ) -> tuple[Cache, Step]:
        """Chunked encode of every prompt, then one replay."""
        cache = self.encode_prompts(cache, prompts, chunks or [count] * len(prompts), count)
        return self.replay(cache, prompts)

    def decode(
        self, cache: Cache, batch: DecodeBatch, steps: int = 1, sampling: object = None
    ) -> tuple[Cache, Decoded]:
        sampling = build_sampling([], bucket(1)) if sampling is None else sampling
        return self.call(("decode", bucket(1, steps)), cache, batch, sampling)

    def greedy(self, cache: Cache, batch: DecodeBatch, steps: int) -> tuple[Cache, Step]:
        """``steps`` single decode steps, [steps, B]."""
        out = []
        for _ in range(steps):
            cache, decoded = self.decode(cache, batch)
            batch = decoded.batch
            out.append(Step.of(jax.tree.map(lambda a: a[0], decoded.sampled)))
        return cache, stacked(out)


def _chunked(prompts: Sequence[Segment], chunks: Sequence[int]) -> list[list[Segment]]:
    """Batches of chunks; a prompt that is done has an empty segment."""
    batches, done = [], [p.start for p in prompts]
    while any(d < p.stop for d, p in zip(done, prompts, strict=True)):
        ends = [min(d + c, p.stop) for d, c, p in zip(done, chunks, prompts, strict=True)]
        batches.append(
            [replace(p, start=d, stop=e) for p, d, e in zip(prompts, done, ends, strict=True)]
        )
        done = ends
    return batches


def decode_batch(
    prompts: Sequence[Segment], *, stop_ids: Sequence[Sequence[int]] = (), last: Sequence[int] = ()
) -> DecodeBatch:
    """Requests that go on behind their prompts; an empty prompt is an inactive place."""
    zeros = np.zeros(PLACES, np.int32)
    batch = DecodeBatch(
        slot=zeros.copy(),
        position=zeros.copy(),
        active=np.zeros(PLACES, bool),
        page_table=page_tables([p.pages for p in prompts], bucket(1)),
        floor=zeros.copy(),
        decoder_floor=zeros.copy(),
        stop_ids=np.full((PLACES, STOP_IDS), -1, np.int32),
        last_position=np.full(PLACES, 1 << 20, np.int32),
    )
    for i, prompt in enumerate(prompts):
        batch.slot[i], batch.position[i], batch.active[i] = prompt.slot, prompt.stop, prompt.stop
        batch.floor[i], batch.decoder_floor[i] = prompt.floor, prompt.decoder_floor
    for i, ids in enumerate(stop_ids):
        batch.stop_ids[i, : len(ids)] = ids
    batch.last_position[: len(last)] = last
    return batch


def with_tokens(cache: Cache, tokens: dict[int, int]) -> Cache:
    """The cache with other tokens to feed, by slot."""
    last = np.array(cache.last_token)
    for slot, token in tokens.items():
        last[slot] = token
    return replace(cache, last_token=jnp.asarray(last))


def host_bits(cache: Cache) -> dict[str, np.ndarray]:
    """A copy of every array of the cache as bytes [lead, ...], by path."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {
        jax.tree_util.keystr(path): np.array(leaf).reshape(leaf.shape[0], -1).view(np.uint8)
        for path, leaf in leaves
    }


def poisoned(cache: Cache) -> Cache:
    """NaN or 0xFF in every row; only the tags, which say that nothing is written, stay.

    History and last token, where 0xFF would mean "none", hold a token that would be noticed.
    """

    def fill(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name.endswith(".tags"):
            return leaf
        if name in (".history", ".last_token"):
            return jnp.full(leaf.shape, 7, leaf.dtype)
        ones = np.full((*leaf.shape, leaf.dtype.itemsize), 0xFF, np.uint8)
        return jnp.asarray(ones.view(leaf.dtype)[..., 0])

    return jax.tree_util.tree_map_with_path(fill, cache)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


MakeBench = Callable[[str], Bench]
