"""A checkpoint's logits beside those that DeepSeek's reference computed for it."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.batch import (
    Segment,
    build_rows,
    build_targets,
    neutral_decode,
    neutral_sampling,
    page_tables,
)
from serving.bench.check_models import CheckpointModels
from serving.bench.check_programs import Kept, Key
from serving.buckets import Bucket, DecodeBatch
from sharding.build import build_ops

FILE = "e2e_quant.npz"
PAGE = 64


@dataclass(frozen=True)
class Bounds:
    """Of rows of logits: mean and worst cosine, share of rows with the same likeliest token."""

    mean: float
    worst: float
    same: float

    def __str__(self) -> str:
        return (
            f"cosine of rows of logits at least {self.mean:g} on average, {self.worst:g} at worst;"
            f" same likeliest token in at least {self.same:g} of the rows"
        )


# What the goldens recommend for their quantised run, end to end; one flipped rounding changes all
# that follows.
GOLDEN = Bounds(mean=0.985, worst=0.90, same=0.70)


@dataclass(frozen=True)
class Agreement:
    name: str
    rows: int
    mean: float
    worst: float
    same: float

    def within(self, bounds: Bounds) -> bool:
        return self.mean >= bounds.mean and self.worst >= bounds.worst and self.same >= bounds.same

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.rows} rows, mean cosine {self.mean:.4f}, worst {self.worst:.4f},"
            f" same likeliest token {self.same:.2f}"
        )


def agreement(name: str, got: np.ndarray, want: np.ndarray) -> Agreement:
    """Of logits [n, V]; NaN agrees with nothing."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    sizes = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    cosine = np.nan_to_num((got * want).sum(-1) / np.maximum(sizes, 1e-30), nan=-1.0)
    same = np.mean(got.argmax(-1) == want.argmax(-1))
    return Agreement(name, len(got), float(cosine.mean()), float(cosine.min()), float(same))


@dataclass(frozen=True)
class _Prompt:
    """tokens: 0 is the first behind the prompt; rows: prompt positions of the logits ``prefill``;
    decode: behind each of the tokens but the last.
    """

    name: str
    ids: np.ndarray
    rows: np.ndarray
    prefill: np.ndarray
    tokens: np.ndarray
    decode: np.ndarray


class GoldenRun:
    """Prompts of a folder's ``FILE`` in one batch: scored, decoded token by token and verified, in
    each case behind the golden tokens. UserError if they are not of the model.
    """

    def __init__(self, folder: str, cfg: Config):
        path = Path(folder) / FILE
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
        except (OSError, ValueError) as error:
            raise UserError(f"--goldens {path}: cannot be read: {error}") from None
        names = [key.removesuffix(".input_ids") for key in arrays if key.endswith(".input_ids")]
        self.prompts = [_prompt(arrays, name) for name in names]
        widths = {prompt.decode.shape[-1] for prompt in self.prompts}
        if widths != {cfg.vocab_size}:
            raise UserError(f"--goldens {path}: is not of a model of {cfg.vocab_size} tokens")
        self.cfg, self.count = cfg, len(self.prompts)
        self.steps = min(len(prompt.decode) for prompt in self.prompts)
        self.longest = max(len(prompt.ids) for prompt in self.prompts)
        self.drafts = min(cfg.dspark_block_size, self.steps - 1)
        self.pages = -(-(self.longest + self.steps + 1) // PAGE)
        self.runs: dict[str, _Run] = {}

    def compile(self, models: CheckpointModels, pool: Executor, options: dict) -> None:
        """``auto`` programs of a model, on the threads of a pool."""
        shape = CacheShape(self.count, self.count * self.pages, PAGE)
        ops = build_ops("tp1", models.numerics, "auto")
        programs, params = models.programs("auto", ops, shape, None)
        keys = [("prefill_scored", self._bucket(self.longest)), ("decode", self._bucket(1))]
        keys += [("verify", self._bucket(1 + self.drafts))] * models.drafts
        made = {key: pool.submit(programs.executable, *key, options) for key in keys}
        self.runs[models.numerics.name] = _Run(programs, params, made)

    def values(self, numerics: str) -> Iterator[Agreement]:
        """Of what was compiled."""
        run = self.runs[numerics]
        cache, scored = self._prompts(run)
        got = [scored[i, prompt.rows] for i, prompt in enumerate(self.prompts)]
        yield self._agreement("prefill", got, [prompt.prefill for prompt in self.prompts])
        yield from self._decoded(run, cache)
        if run.programs.speculation is not None:
            yield from self._verified(run, self._prompts(run)[0])

    def _prompts(self, run: "_Run") -> tuple[Cache, np.ndarray]:
        """The cache behind the prompts, and the logits [B, T, V] of their rows."""
        bucket, cache = self._bucket(self.longest), run.programs.new_cache()
        segments = [
            Segment(prompt.ids, 0, len(prompt.ids), i, self._pages_of(i))
            for i, prompt in enumerate(self.prompts)
        ]
        rows = build_rows(segments, bucket, self.cfg.engram_max_ngram_size - 1)
        targets = build_targets(segments, bucket)
        return run("prefill_scored", bucket, cache, rows, self._sampling(), targets)

    def _decoded(self, run: "_Run", cache: Cache) -> Iterator[Agreement]:
        """Behind the golden tokens one by one."""
        logits = []
        for step in range(self.steps):
            inputs = self._batch(step), self._sampling()
            cache, row = run("decode", self._bucket(1), self._behind(cache, step), *inputs)
            logits.append(row)
        got = np.stack([row.reshape(self.count, -1) for row in logits], axis=1)
        yield self._agreement("decode", got, [p.decode[: self.steps] for p in self.prompts])

    def _verified(self, run: "_Run", cache: Cache) -> Iterator[Agreement]:
        """As drafts, as many as a block has."""
        count = self.drafts
        drafts = np.stack([prompt.tokens[1 : 1 + count] for prompt in self.prompts])
        inputs = self._batch(0), self._sampling(), drafts.astype(np.int32)
        allowed = np.full(self.count, count, np.int32)
        bucket, cache = self._bucket(1 + count), self._behind(cache, 0)
        _, logits = run("verify", bucket, cache, *inputs, allowed)
        want = [prompt.decode[: 1 + count] for prompt in self.prompts]
        yield self._agreement("verify", logits, want)

    def _agreement(self, phase: str, got: Any, want: list[np.ndarray]) -> Agreement:
        """Of all prompts together: the rows of one are too few for a share."""
        names = ", ".join(prompt.name for prompt in self.prompts)
        return agreement(f"{phase} of {names}", np.concatenate(list(got)), np.concatenate(want))

    def _behind(self, cache: Cache, step: int) -> Cache:
        """With the golden token as the newest."""
        tokens = [prompt.tokens[step] for prompt in self.prompts]
        return replace(cache, last_token=jnp.asarray(tokens, jnp.int32))

    def _batch(self, step: int) -> DecodeBatch:
        idle: Any = neutral_decode(self.count, self.pages, 1)
        return replace(
            idle,
            slot=np.arange(self.count, dtype=np.int32),
            position=np.array([len(prompt.ids) + step for prompt in self.prompts], np.int32),
            active=np.ones(self.count, bool),
            page_table=page_tables([self._pages_of(i) for i in range(self.count)], self._bucket(1)),
            last_position=np.full(self.count, self.pages * PAGE, np.int32),
        )

    def _bucket(self, rows: int) -> Bucket:
        return Bucket(self.count, rows, self.pages)

    def _pages_of(self, place: int) -> range:
        return range(place * self.pages, (place + 1) * self.pages)

    def _sampling(self) -> Any:
        return neutral_sampling(self.count, 1, None)


def _prompt(arrays: dict[str, np.ndarray], name: str) -> _Prompt:
    ids = arrays[f"{name}.input_ids"]
    return _Prompt(
        name,
        ids,
        arrays.get(f"{name}.prefill_positions", np.arange(len(ids))),
        arrays[f"{name}.prefill_logits"],
        arrays[f"{name}.decode_tokens"],
        arrays[f"{name}.decode_logits"],
    )


@dataclass(frozen=True)
class _Run:
    """Programs that are being compiled; called, they give the cache and logits."""

    programs: Kept
    params: Any
    made: dict[Key, Future[Any]]

    def __call__(
        self, name: str, bucket: Bucket, cache: Cache, *inputs: Any
    ) -> tuple[Cache, np.ndarray]:
        run = self.made[name, bucket].result()
        cache, kept, _ = run(self.params, cache, *jax.device_put(inputs), None)
        return cache, np.asarray(kept["logits"])
