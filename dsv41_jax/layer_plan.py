"""Who compresses, who selects and who reads whom (ARCHITECTURE section 3)."""

from bisect import bisect_right
from dataclasses import dataclass

from dsv41_jax.config import Config


@dataclass(frozen=True)
class LayerPlan:
    """One backbone layer.

    ratio: tokens per global entry, 0 for window-only layers. kv_source and index_source: the layer
    whose pool and whose selection it uses, None for window-only layers. restricted: its own
    selection stays inside the candidate blocks.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: bool
    restricted: bool
    engram: bool

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index

    @property
    def selects(self) -> bool:
        return self.index_source == self.index

    @property
    def kind(self) -> str:
        if self.ratio == 0:
            return "window"
        if self.owns_kv:
            return "full"
        return "reindex" if self.selects else "reuse"


def layer_plan(cfg: Config) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer."""
    return tuple(_plan(cfg, index) for index in range(cfg.num_hidden_layers))


def _plan(cfg: Config, index: int) -> LayerPlan:
    ratio = cfg.compress_ratios[index]
    selects = index in cfg.index_source_layer_ids
    return LayerPlan(
        index=index,
        ratio=ratio,
        kv_source=_last(cfg.kv_source_layer_ids, index) if ratio else None,
        index_source=_last(cfg.index_source_layer_ids, index) if ratio else None,
        candidate_source=index == cfg.candidate_source_layer_id,
        restricted=selects and index > cfg.candidate_source_layer_id,
        engram=index in cfg.engram_layer_ids,
    )


def _last(sources: tuple[int, ...], index: int) -> int:
    return sources[bisect_right(sources, index) - 1]
