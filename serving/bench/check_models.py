"""What is checked: a preset's layers of the real width and random weights, or a checkpoint."""

import time
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import nnx

from dsv41_jax.cache import CacheShape
from dsv41_jax.command import progress_line
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.moe import RepackedExperts
from dsv41_jax.ops import Ops
from pallas_kernels.numerics import SERVING, Numerics
from serving.bench.check_compare import Tolerance
from serving.bench.check_programs import CheckpointPrograms, Kept, RandomPrograms
from serving.bench.forward_cases import Case
from serving.bench.forward_routing import new_tables
from serving.bench.forward_weights import random_sets, weight_sets
from serving.generate import Loaded, load
from sharding.place import REPLICATED, place

NEAR = Tolerance(rel=0.08, cosine=0.997, stored_rel=0.15)
FAR = Tolerance(rel=0.5, cosine=0.9, stored_rel=0.5)
RANDOM_CASES = (
    "decode=1*1@500",
    "decode=32*1@450",
    "verify=4*6@500:5",
    "draft=4*1@500",
    "prompt=2*150@500c",
    "long decode=8*1@20000",
)


class Models(Protocol):
    """drafts: whether there are draft stages."""

    cfg: Config
    drafts: bool

    @property
    def cases(self) -> tuple[str, ...]: ...

    def limit(self, case: Case) -> Tolerance: ...

    def programs(
        self, kernels: str, ops: Ops, shape: CacheShape, leader: Kept | None
    ) -> tuple[Kept, Any]:
        """Programs of a kind of kernels, of given operations, and their parameters."""
        ...


class RandomModels:
    """Layers of a preset; rows reach the same random experts in all programs."""

    drafts = True

    def __init__(self, cfg: Config, sets: int):
        self.cfg, self.sets = cfg, min(sets, cfg.num_hidden_layers)
        self.placement = place("tp1", cfg)
        self.tables = new_tables(cfg, "random", self.sets, draft=True)

    @property
    def cases(self) -> tuple[str, ...]:
        return RANDOM_CASES

    def limit(self, case: Case) -> Tolerance:
        tokens = max(group.tokens for group in case.groups)
        return NEAR if tokens <= self.cfg.index_topk else FAR

    def programs(
        self, kernels: str, ops: Ops, shape: CacheShape, leader: Kept | None
    ) -> tuple[Kept, Any]:
        began = time.perf_counter()
        sets = weight_sets(self.cfg, SERVING, self.placement, self.sets, kernels, draft=True)
        params = {
            "weights": jax.block_until_ready(random_sets(sets, kernels)),
            "routing": self.placement.put(self.tables, REPLICATED),
        }
        progress_line(f"{kernels}: weights in {time.perf_counter() - began:.0f} s")
        return RandomPrograms(sets, ops, shape, self.tables), params


class CheckpointModels:
    """A checkpoint, loaded once for all kinds of kernels if they read the same weights; the second
    programs follow what routers and indexers of the first chose. UserError for what is no
    checkpoint.
    """

    def __init__(self, directory: str | Path, numerics: Numerics = SERVING):
        self.directory, self.numerics = directory, numerics
        self.loaded = self._load("auto")
        self.cfg, self.drafts = self.loaded.model.cfg, len(self.loaded.model.mtp) > 0

    @property
    def cases(self) -> tuple[str, ...]:
        """Up to ``index_topk`` tokens, and beyond them as far as the positions go."""
        cfg = self.cfg
        far = min(8 * cfg.index_topk, cfg.max_position_embeddings // 2)
        near, rows = min(cfg.index_topk, far), 1 + cfg.dspark_block_size
        cases = f"decode=4*1@{near}", f"long decode=4*1@{far}", f"prompt=2*{far // 2}@{far}c"
        if not self.drafts:
            return cases
        return *cases, f"verify=2*{rows}@{far}:{rows - 1}", f"draft=2*1@{far}"

    def limit(self, case: Case) -> Tolerance:
        """Selections are the same, so beyond ``index_topk`` tokens too."""
        return NEAR

    def programs(
        self, kernels: str, ops: Ops, shape: CacheShape, leader: Kept | None
    ) -> tuple[Kept, Any]:
        model = self.loaded.model
        if kernels == "reference" and self.packed:
            model = self._load(kernels).model
        programs = CheckpointPrograms(model, ops, shape, leader)
        return programs, programs.params

    @property
    def packed(self) -> bool:
        """Whether experts lie as only the kernels read them."""
        modules = nnx.iter_modules(self.loaded.model)
        return any(isinstance(module, RepackedExperts) for _, module in modules)

    def _load(self, kernels: str) -> Loaded:
        began = time.perf_counter()
        loaded = load(self.directory, self.numerics, kernels=kernels)
        progress_line(
            f"{kernels}, {self.numerics.name}: loaded in {time.perf_counter() - began:.0f} s"
        )
        return loaded


def checked_cases(models: Models, cases: list[Case]) -> None:
    """UserError for cases that the model cannot run."""
    longest = max(group.tokens for case in cases for group in case.groups)
    if longest > models.cfg.max_position_embeddings:
        limit = f"{models.cfg.max_position_embeddings} (max_position_embeddings)"
        raise UserError(f"--case of {longest} tokens: must be at most {limit}")
    for case in cases:
        if case.phase in ("draft", "verify") and not models.drafts:
            raise UserError(f"--case {case.key}: the checkpoint has no draft stages")
