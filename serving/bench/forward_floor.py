"""The least time of a measured dispatch, from bytes and FLOPs (``sharding.roofline``): weights,
caches and activations that have to move, without launches.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import jax

from dsv41_jax.layer_plan import layer_plan
from serving.bench.forward_cases import Dispatch
from serving.bench.forward_routing import touched
from serving.bench.forward_weights import WeightSets
from sharding.estimate import ShardedModel
from sharding.hardware import Hardware
from sharding.roofline import Roofline, Rows, Step

_EXPERTS = re.compile(r"\.ffn\.experts\.")
# Of the draft stages, what a step that verifies reads for their windows' rows; the stages
# themselves read the second, too.
_FEATURES = re.compile(r"mtp\.0\.main_proj\.")
_WINDOWS = re.compile(r"mtp\.\d+\.attn\.wkv\.")


@dataclass(frozen=True)
class Floors:
    """Floors of a model on a machine, its experts picked as the tables of a routing say."""

    sets: WeightSets
    machine: Hardware
    routing: str

    def layers(self, dispatch: Dispatch) -> list[int]:
        """The layers that a dispatch runs."""
        every, last = range(self.sets.cfg.num_hidden_layers), self.sets.cfg.last_kv_source
        if dispatch.program == "draft":
            return []
        halves = {"encode": every[: last + 1], "replay": every[last + 1 :]}
        return list(halves.get(dispatch.program, every))

    def dispatch(self, dispatch: Dispatch) -> float:
        """Microseconds of everything that a dispatch runs, but for what a prompt's makes of window
        rows of draft stages.
        """
        layers = sum(self.layer(dispatch, index) for index in self.layers(dispatch))
        windows = self._windows() if dispatch.program == "verify" else 0.0
        return layers + self.ends(dispatch) + windows

    def layer(self, dispatch: Dispatch, index: int) -> float:
        """Microseconds of one layer of a dispatch, Engram included."""
        roofline, rows = self._roofline(dispatch), self._rows(dispatch)
        parts = roofline.layer(layer_plan(self.sets.cfg)[index], rows)
        if self.sets.placement.division.ways("experts") == 1:
            parts["experts"] = self._experts(roofline, rows, index)
        return sum(us for name, us in parts.items() if name != "launches")

    def ends(self, dispatch: Dispatch) -> float:
        """Microseconds of what a dispatch runs beside layers: the head, or the draft stages."""
        if dispatch.program == "encode":
            return 0.0
        head = self._roofline(dispatch).ends(self._rows(dispatch))["head"]
        return head + (self._draft(dispatch) if dispatch.program == "draft" else 0.0)

    def experts(self, rows: int) -> float:
        """Distinct experts of a layer that so many rows reach, the mean over tables."""
        cfg = self.sets.cfg
        kind = cfg.n_routed_experts, cfg.num_experts_per_tok
        return touched(self.routing, *kind, rows, self.sets.count)

    def _experts(self, roofline: Roofline, rows: Rows, index: int) -> float:
        cfg, machine = self.sets.cfg, self.machine
        weights = self._model.weights
        routed, shared = weights[index, "experts"], weights[index, "shared"]
        one = routed.nbytes / cfg.n_routed_experts
        picks = rows.local * cfg.num_experts_per_tok / cfg.n_routed_experts
        return roofline.op_us(
            self.experts(rows.local) * one + shared.nbytes,
            flops=2 * (picks * routed.parameters + rows.local * shared.parameters),
            tflops=machine.weights_tflops,
        )

    def _draft(self, dispatch: Dispatch) -> float:
        """Bytes of the stages, of their experts only what the block reaches; Markov heads for every
        token of it.
        """
        cfg, rows = self.sets.cfg, dispatch.bucket.requests * dispatch.bucket.rows
        kind = cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok
        share = touched(self.routing, *kind, rows, self.sets.count) / kind[0]
        total = 0.0
        for path, size in self._stages.items():
            if not _FEATURES.match(path):
                often = dispatch.bucket.rows if path.endswith("markov_head.head.weight") else 1
                read = 0 if path.endswith("markov_head.embed.weight") else often
                total += size * (share if _EXPERTS.search(path) else read)
        return total / self.machine["memory_tbps"] / 1e6

    def _windows(self) -> float:
        """Bytes of what makes the window rows of the draft stages."""
        read = [_FEATURES, _WINDOWS]
        total = sum(size for path, size in self._stages.items() if any(r.match(path) for r in read))
        return total / self.machine["memory_tbps"] / 1e6

    @cached_property
    def _stages(self) -> dict[str, int]:
        """Bytes of each parameter of the draft stages."""
        return {
            path: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
            for path, value in self.sets.shapes().items()
            if path.startswith("mtp.")
        }

    @cached_property
    def _model(self) -> ShardedModel:
        return ShardedModel(self.sets.cfg, self.sets.placement.division.layout)

    def _roofline(self, dispatch: Dispatch) -> Roofline:
        prompt = dispatch.program in ("encode", "prefill_full", "replay")
        phase = "prefill" if prompt else "verify" if dispatch.bucket.rows > 1 else "decode"
        step = Step(phase, dispatch.bucket.requests, dispatch.length)
        model = self._model
        return Roofline(model.cfg, model.division, model.weights, self.machine, step)

    def _rows(self, dispatch: Dispatch) -> Rows:
        requests, each, place = dispatch.bucket.requests, dispatch.bucket.rows, dispatch.places[0]
        total = requests * each * self.sets.placement.division.ways("batch")
        return Rows(requests, each, total, place.start, place.stop)
