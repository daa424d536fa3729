"""Engines with drafts, drafters that propose what a test wants, and the bytes that may be read."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dsv41_jax.cache import Cache
from serving.buckets import Bucket, DecodeBatch
from serving.engine import Engine
from serving.forwards_speculative import Proposals
from serving.options import EngineOptions
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.scheduler import Scheduler
from serving.sequence import Sequence as Running
from serving.speculative import Speculation

SLOTS, PAGE, WINDOW, LENGTH = 8, 16, 16, 5
OPTIONS = EngineOptions(
    slots=SLOTS,
    pages=64,
    page_size=PAGE,
    max_tokens=128,
    prefill=((SLOTS, WINDOW),),
    decode=(SLOTS,),
    logprobs=4,
    prompt_logprobs=False,
    speculation=Speculation(LENGTH),
)


class Speculating:
    """Makes engines over one model; a program is compiled once for all of them."""

    def __init__(self, model, ops, tokenizer, grammars):
        self.model, self.ops, self.tokenizer, self.grammars = model, ops, tokenizer, grammars
        self.executables: dict = {}

    def make(
        self, *, pool: int = OPTIONS.pages, max_batch: int | None = SLOTS, **options: object
    ) -> Engine:
        """pool: pages that the host hands out. max_batch: see ``Speculation``; None: no drafts."""
        speculation = Speculation(LENGTH, max_batch=max_batch or SLOTS)
        options = {"speculation": speculation, **options}
        made = self.model, self.ops, replace(OPTIONS, **options), self.tokenizer
        engine = Engine(*made, self.executables, self.grammars)
        engine.warm_up()
        limits = engine.ranks[0].limits
        if max_batch is None:
            limits = replace(limits, drafts=0)
        pages = PagePool(pool)
        engine.ranks[0] = Scheduler(limits, pages, PrefixCache(pages, PAGE))
        return engine


Propose = Callable[[Running, int, int], Sequence[int]]


class Drafter:
    """The programs of an engine with ``draft`` replaced: propose(sequence, position, n) gives the
    drafts behind a sequence's newest token at ``position``, None the model's own. ``made`` keeps
    what was proposed.
    """

    def __init__(self, engine: Engine, propose: Propose | None = None):
        self.programs, self._engine, self._propose = engine.executor.programs, engine, propose
        self.made: list[Proposals] = []
        engine.executor.programs = self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["programs"], name)

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        out = self.programs(name, bucket, cache, *inputs)
        if name != "draft":
            return out
        if self._propose is not None:
            out = replace(out, ids=self._ids(bucket, cache, *inputs))
        self.made.append(out)
        return out

    def _ids(self, bucket: Bucket, cache: Cache, batch: DecodeBatch) -> np.ndarray:
        ids = np.zeros((bucket.requests, bucket.rows), np.int32)
        position, by_slot = np.asarray(cache.position), self._by_slot()
        for place, slot in enumerate(batch.slot.tolist()):
            if batch.active[place]:
                ids[place] = self._propose(by_slot[slot], int(position[slot]), bucket.rows)
        return ids

    def _by_slot(self) -> dict[int, Running]:
        return {sequence.slot: sequence for sequence in self._engine.ranks[0].running}


def right_for_a_while(texts: dict[Request, Sequence[int]], seed: int) -> Propose:
    """Drafts that follow the known answer for a random number of tokens, then go wrong."""
    rng = np.random.default_rng(seed)

    def propose(sequence: Running, position: int, n: int) -> list[int]:
        first = position + 1 - sequence.length
        known = list(texts.get(sequence.request, ())[first : first + n])
        right = int(rng.integers(0, n + 1))
        wrong = [(token + 1) % 512 for token in known[right:]]
        return [*known[:right], *wrong, *[3] * (n - len(known))]

    return propose


def readable(cache: Cache, slot: int, pages: Sequence[int], ratios: Sequence[int]) -> dict:
    """Digests, by name, of everything that a later step of the slot's request can read."""
    position = int(np.asarray(cache.position)[slot])
    found: dict[str, Any] = {name: np.asarray(getattr(cache, name))[slot] for name in _PLAIN}
    rings = {f"windows{i}": (ring, WINDOW) for i, ring in enumerate(cache.windows)}
    rings |= {f"drafts{i}": (ring, WINDOW) for i, ring in enumerate(cache.drafts)}
    rings |= {f"pairs{i}": (ring, position % 2) for i, ring in cache.pairs.items()}
    for name, (ring, count) in rings.items():
        places = np.arange(max(position - count, 0), position) % ring.tags.shape[1]
        found |= {f"{name}.{i}": leaf[slot, places] for i, leaf in enumerate(_host(ring))}
    for owner, pool in cache.pools.items():
        closed = position // ratios[owner]
        for i, leaf in enumerate(_host(pool)):
            rows = leaf[list(pages)].reshape(-1, *leaf.shape[2:])
            found[f"pool{owner}.{i}"] = rows[:closed]
    return {name: _digest(np.asarray(array)) for name, array in found.items()}


_PLAIN = ("history", "last_token", "position", "counts")


def _host(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _digest(array: np.ndarray) -> str:
    return hashlib.sha1(np.ascontiguousarray(array).tobytes()).hexdigest()
