"""Time of one step from bytes, FLOPs, collectives and launches, part by part.

Each op of a layer takes the longer of its memory and its matrix time; ops follow one another and
nothing overlaps. Routing is uniform (FLOPs of experts are spread evenly, bytes are those of the
busiest rank); activations beside experts and projections are not counted; prefill is one chunk, and
a tensor group splits its attention, scan and streams by tokens.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from dsv41_jax.checkpoint.inventory import TensorSpec, Totals
from dsv41_jax.config import Config
from dsv41_jax.layer_plan import LayerPlan, layer_plan
from sharding.hardware import Hardware
from sharding.layouts import Division, Layout

PHASES = ("decode", "verify", "prefill")
# Of the bf16 peak: 640 of 790 TFLOP/s, the best published sparse prefill on Hopper.
ATTENTION_SHARE = 640 / 790
BF16_BYTES = 2
_GROUPS = {
    r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.": "dense",
    r"attn\.(compressor|indexer)\.": "index_weights",
    r"ffn\.gate\.weight": "gate",
    r"ffn\.experts\.": "experts",
    r"ffn\.shared_experts\.": "shared",
    r"hc_\w+_fn": "mhc",
    r"engram\.wkv\.": "engram",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_ROOT = -1
Weights = Mapping[tuple[int, str], Totals]


@dataclass(frozen=True)
class Step:
    """One step over the whole layout. batch: requests. context: tokens behind each row of decode
    and verify, or prompt tokens of prefill. index_split: a tensor group shares the scan of keys.
    """

    phase: str
    batch: int
    context: int
    bounded_replay: bool = True
    index_split: bool = False

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase={self.phase!r} must be one of {PHASES}")
        if self.batch < 1 or self.context < 1:
            raise ValueError(f"batch={self.batch} and context={self.context} must be at least 1")


@dataclass(frozen=True)
class Rows:
    """Rows of one layer: requests of the busiest data rank, rows of each, rows of all ranks;
    their positions run from start to end.
    """

    requests: int
    each: int
    total: int
    start: int
    end: int

    @property
    def local(self) -> int:
        return self.requests * self.each


def group_weights(local: Mapping[str, TensorSpec]) -> Weights:
    """What a device holds (``Layout.local_specs``) by layer and op; the head is (-1, "head")."""
    groups = defaultdict(list)
    for path, spec in local.items():
        match = _LAYER.fullmatch(path)
        if match:
            for start, name in _GROUPS.items():
                if re.match(start, match[2]):
                    groups[int(match[1]), name].append(spec)
        elif path == "head.weight":
            groups[_ROOT, "head"].append(spec)
    return {key: Totals.of(specs) for key, specs in groups.items()}


def step_parts(
    cfg: Config, division: Division, weights: Weights, hardware: Hardware, step: Step
) -> dict[str, float]:
    """Microseconds of each part of a step on the busiest device; UserError for a figure of the
    hardware that is unknown.
    """
    require_figures(hardware, division.layout)
    model = Roofline(cfg, division, weights, hardware, step)
    parts: dict[str, float] = defaultdict(float)
    for layer in layer_plan(cfg):
        rows = _rows(cfg, division, step, layer.index)
        for name, us in model.layer(layer, rows).items():
            parts[name] += us
    for name, us in model.ends(_rows(cfg, division, step, 0)).items():
        parts[name] += us
    return dict(parts)


def require_figures(hardware: Hardware, layout: Layout) -> None:
    """UserError that lists every unknown figure which an estimate of the layout needs."""
    matrix = f"{hardware.matrix}_tflops"
    names = ["memory_gb", "memory_tbps", "bf16_tflops", "fp8_tflops", matrix, "launch_us"]
    names += ["kernels_per_layer", "weights_factor", "cache_factor", "rows_factor"]
    names += ["reserved_fraction", "gpus_per_domain"]
    if layout.devices > 1:
        names += ["link_gbps", "collective_us"]
    if layout.devices > (hardware.known("gpus_per_domain") or layout.devices):
        names.append("network_gbps")
    hardware.require(dict.fromkeys(names))


@lru_cache
def busiest_experts(experts: int, ranks: int, per_token: int, rows: int) -> float:
    """Distinct experts of the busiest rank (expected): each is touched with probability
    1 - (1 - per_token / experts)^rows, independently.
    """
    held, missed = -(-experts // ranks), (1 - per_token / experts) ** rows
    below, total = 0.0, 0.0
    for k in range(held):
        below += comb(held, k) * (1 - missed) ** k * missed ** (held - k)
        total += 1 - min(below, 1.0) ** ranks
    return total


def mean_capped(start: float, end: float, cap: float) -> float:
    """Mean of min(p, cap) over positions p from start to end."""
    if end <= cap:
        return (start + end) / 2
    if start >= cap:
        return cap
    return ((cap - start) * (cap + start) / 2 + (end - cap) * cap) / (end - start)


def _rows(cfg: Config, division: Division, step: Step, layer: int) -> Rows:
    requests = -(-step.batch // division.ways("batch"))
    if step.phase != "prefill":
        each = 1 + (cfg.dspark_block_size if step.phase == "verify" else 0)
        return Rows(requests, each, step.batch * each, step.context, step.context)
    each = step.context
    if step.bounded_replay and layer > cfg.last_kv_source:
        each = min(each, cfg.sliding_window)
    return Rows(requests, each, step.batch * each, step.context - each, step.context)


@dataclass(frozen=True)
class Roofline:
    """The least time of a step's parts on a machine, in microseconds."""

    cfg: Config
    division: Division
    weights: Weights
    hardware: Hardware
    step: Step

    @property
    def layout(self) -> Layout:
        return self.division.layout

    def layer(self, layer: LayerPlan, rows: Rows) -> dict[str, float]:
        """The parts of one layer."""
        parts = {
            "dense": self._product(layer.index, "dense", rows.local),
            "experts": self._experts(layer.index, rows),
            "gate": self._gate(layer.index, rows),
            "mhc": self._streams(layer.index, rows),
            "attention": self._attention(layer, rows),
            "index_weights": self._product(layer.index, "index_weights", rows.local),
            "indexer": self._scan(layer, rows) if layer.selects else 0.0,
            "collectives": self._layer_collectives(rows),
            "launches": self.hardware["kernels_per_layer"] * self.hardware["launch_us"],
        }
        if layer.engram:
            parts["engram"] = self._engram(layer.index, rows)
            parts["edge_collectives"] = self._engram_collectives(rows)
        return parts

    def ends(self, rows: Rows) -> dict[str, float]:
        """Embedding, head, and the choice of a token among the parts of the vocabulary."""
        scored = rows.requests if self.step.phase == "prefill" else rows.local
        edges = 0.0
        if self.layout.tensor > 1:
            edges = self._all_reduce(rows.local) + self._collective(0, self.layout.tensor)
        return {"head": self._product(_ROOT, "head", scored), "edge_collectives": edges}

    def op_us(
        self, weights: float = 0, cache: float = 0, rows: float = 0,
        flops: float = 0, tflops: float = 1,
    ) -> float:  # fmt: skip
        """Microseconds of an op: the longer of memory time (bytes of each kind) and matrix time."""
        machine = self.hardware
        read = weights / machine["weights_factor"] + cache / machine["cache_factor"]
        read += rows / machine["rows_factor"]
        return max(read / machine["memory_tbps"], flops / tflops) / 1e6

    def _product(self, layer: int, group: str, rows: int) -> float:
        held = self.weights.get((layer, group), Totals(0, 0, 0))
        return self.op_us(
            held.nbytes, flops=2 * rows * held.parameters, tflops=self.hardware.weights_tflops
        )

    def _experts(self, layer: int, rows: Rows) -> float:
        cfg, ranks = self.cfg, self.division.ways("experts")
        routed, shared = self.weights[layer, "experts"], self.weights[layer, "shared"]
        held = -(-cfg.n_routed_experts // ranks)
        # Without experts over the data ranks each of them has a whole copy and its own rows only.
        seen = rows.total if self.layout.experts_over_data else rows.local
        touched = busiest_experts(cfg.n_routed_experts, ranks, cfg.num_experts_per_tok, seen)
        picks = seen * cfg.num_experts_per_tok / ranks
        return self.op_us(
            touched * routed.nbytes / held + shared.nbytes,
            flops=2 * (picks * routed.parameters / held + rows.local * shared.parameters),
            tflops=self.hardware.weights_tflops,
        )

    def _gate(self, layer: int, rows: Rows) -> float:
        held = self.weights[layer, "gate"]
        moved = rows.local * (self.cfg.hidden_size * BF16_BYTES + 4 * self.cfg.n_routed_experts)
        flops = 2 * rows.local * held.parameters
        return self.op_us(held.nbytes, rows=moved, flops=flops, tflops=self.hardware["bf16_tflops"])

    def _split(self, rows: Rows) -> float:
        """Rows of one rank where prefill splits them over the tensor group."""
        return rows.local / (self.layout.tensor if self.step.phase == "prefill" else 1)

    def _streams(self, layer: int, rows: Rows) -> float:
        """Two sites, each of which reads and writes the streams, one layer input and one output."""
        width = 2 * (self.cfg.hc_width + self.cfg.hidden_size) * BF16_BYTES
        return self.op_us(self.weights[layer, "mhc"].nbytes, rows=2 * self._split(rows) * width)

    def _attention(self, layer: LayerPlan, rows: Rows) -> float:
        cfg = self.cfg
        window = mean_capped(rows.start, rows.end, cfg.sliding_window)
        picked = 0.0
        if layer.ratio:
            picked = mean_capped(rows.start, rows.end, cfg.index_topk * layer.ratio) / layer.ratio
        latent = cfg.head_dim // 2 + cfg.head_dim // 16
        window_row = cfg.head_dim + cfg.head_dim // 32
        cache = rows.local * (picked * latent + window * window_row)
        share = rows.local / self.layout.tensor
        return self.op_us(
            # The gathered rows of neighbouring prompt tokens overlap, and come from the L2 cache.
            cache=0 if self.step.phase == "prefill" else cache,
            rows=share * 2 * cfg.attention_width * BF16_BYTES,
            flops=share * (picked + window) * 4 * cfg.attention_width,
            tflops=self.hardware["bf16_tflops"] * ATTENTION_SHARE,
        )

    def _scan(self, layer: LayerPlan, rows: Rows) -> float:
        cfg = self.cfg
        cap = rows.end / layer.ratio
        if layer.restricted:
            cap = min(cap, cfg.candidate_topk_blocks * cfg.candidate_block_size)
        keys = mean_capped(rows.start / layer.ratio, rows.end / layer.ratio, cap)
        key = cfg.index_head_dim // 2 + cfg.index_head_dim // 32
        shared = self.step.index_split or self.step.phase == "prefill"
        ways = self.layout.tensor if shared else 1
        return self.op_us(
            cache=rows.requests * cap * key / ways,
            flops=rows.local * keys * 2 * cfg.index_n_heads * cfg.index_head_dim / ways,
            tflops=self.hardware["fp8_tflops"],
        )

    def _engram(self, layer: int, rows: Rows) -> float:
        row = self.cfg.engram_head_dim + self.cfg.engram_head_dim // 32
        gathered = rows.total * self.cfg.engram_columns * row / self.layout.devices
        return self.op_us(gathered) + self._product(layer, "engram", rows.local)

    def _layer_collectives(self, rows: Rows) -> float:
        """All-reduces after attention and experts; dispatch and combine of rows over ranks."""
        cfg, us = self.cfg, 0.0
        if self.layout.tensor > 1:
            us += 2 * self._all_reduce(rows.local)
        ranks = self.layout.data if self.layout.experts_over_data else 1
        if ranks > 1:
            elsewhere = (ranks - 1) * (1 - (1 - 1 / ranks) ** cfg.num_experts_per_tok)
            moved = rows.local * elsewhere * cfg.hidden_size * BF16_BYTES
            us += 2 * self._collective(moved, self.layout.devices)
        return us

    def _engram_collectives(self, rows: Rows) -> float:
        """The exchange of table rows, and of the outputs that a tensor group computed in parts."""
        cfg, layout, us = self.cfg, self.layout, 0.0
        if layout.devices > 1:
            row = cfg.engram_head_dim + cfg.engram_head_dim // 32
            moved = rows.local * cfg.engram_columns * row * (layout.devices - 1) / layout.devices
            us += self._collective(moved, layout.devices)
        if layout.tensor > 1:
            outputs = (cfg.hc_mult + 1) * cfg.hidden_size * BF16_BYTES
            moved = rows.local * outputs * (layout.tensor - 1) / layout.tensor
            us += self._collective(moved, layout.tensor)
        return us

    def _all_reduce(self, rows: int) -> float:
        ranks = self.layout.tensor
        moved = 2 * (ranks - 1) / ranks * rows * self.cfg.hidden_size * BF16_BYTES
        return self._collective(moved, ranks)

    def _collective(self, sent: float, ranks: int) -> float:
        """The longer of the least time of a collective and the bytes that a rank sends."""
        near = ranks <= self.hardware["gpus_per_domain"]
        link = self.hardware["link_gbps" if near else "network_gbps"]
        return max(self.hardware["collective_us"], sent / link / 1e3)
