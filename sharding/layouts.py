"""Named layouts: which mesh axes each logical axis of the model is split over.

A layout is a mesh of ``data`` x ``model`` devices. ``tpN`` splits heads, output-projection groups,
expert columns and the vocabulary over N. ``depN`` gives each of N ranks its own requests and pages
and spreads whole experts over the ranks. ``tpNxdpM`` is M copies of ``tpN``, ``tpNxdepM`` spreads
whole experts over M groups of N, their columns inside a group. Engram rows are always spread over
all devices (ARCHITECTURE section 9).

What does not divide: heads and vocabulary are refused. Groups, Engram outputs and expert columns
whose parts would cut a block of one scale are held whole by every tensor rank; whole experts are
then spread over the tensor ranks too. Experts and Engram rows are padded to a multiple.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from dsv41_jax.checkpoint.inventory import BLOCK, TensorSpec, scale_name
from dsv41_jax.checkpoint.parameters import Parameter
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError

DATA, MODEL = "data", "model"

# Logical dims of a parameter (ARCHITECTURE section 2) by the end of its path, stacked experts
# first; a parameter that no line names is held whole by every device.
_SPLITS: dict[str, tuple[str | None, ...]] = {
    ".attn.wq_b.weight": ("heads", None),
    ".attn.attn_sink": ("heads",),
    ".attn.wo_a.weight": ("groups", None),
    ".attn.wo_b.weight": (None, "groups"),
    ".ffn.experts.w1.weight": ("experts", "expert_columns", None),
    ".ffn.experts.w2.weight": ("experts", None, "expert_columns"),
    ".ffn.experts.w3.weight": ("experts", "expert_columns", None),
    ".ffn.experts.weight": ("expert_parts",),  # repacked: one rank after the other
    ".ffn.shared_experts.w1.weight": ("expert_columns", None),
    ".ffn.shared_experts.w2.weight": (None, "expert_columns"),
    ".ffn.shared_experts.w3.weight": ("expert_columns", None),
    ".engram.embed.weight": ("engram_rows", None),
    ".engram.wkv.weight": ("engram_outputs", None),
    ".markov_head.embed.weight": ("vocabulary", None),
    ".markov_head.head.weight": ("vocabulary", None),
}
_ROOT_SPLITS: dict[str, tuple[str | None, ...]] = {
    "embed.weight": ("vocabulary", None),
    "head.weight": ("vocabulary", None),
}


@dataclass(frozen=True)
class Layout:
    """One layout. tensor and data: extents of the mesh axes; experts_over_data: whole experts are
    spread over the data axis instead of repeated on it.
    """

    name: str
    tensor: int
    data: int
    experts_over_data: bool

    @property
    def devices(self) -> int:
        return self.tensor * self.data

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Extent of each mesh axis, outermost first."""
        return {DATA: self.data, MODEL: self.tensor}

    def divide(self, cfg: Config) -> "Division":
        """The layout applied to a model; UserError that names every axis which must divide and does
        not, its extent and the divisor.
        """
        refused, notes, axes = [], [], self._evenly()
        for axis in _extents(cfg):
            divisor = prod(self.mesh_shape[a] for a in axes[axis.logical]) * axis.block
            if axis.extent % divisor == 0:
                continue
            blocks = f" (blocks of {axis.block})" if axis.block > 1 else ""
            problem = f"{axis.name} = {axis.extent}{blocks}: "
            if axis.required:
                refused.append(f"{problem}must be divisible by {divisor}")
            else:
                notes.append(f"{problem}not divisible by {divisor}, whole on every tensor rank")
                axes[axis.logical] = ()
        if refused:
            raise UserError(f"layout {self.name}: {'; '.join(refused)}", refused)
        if self.tensor > 1 and not axes["expert_columns"]:
            axes["experts"] = (*axes["experts"], MODEL)
        axes["expert_parts"] = (*axes["experts"], *axes["expert_columns"])
        ways = prod(self.mesh_shape[a] for a in axes["experts"])
        for name, count in _expert_counts(cfg):
            if count % ways:
                notes.append(f"{name} = {count}: padded to {-(-count // ways) * ways}")
        return Division(cfg, self, axes, tuple(notes))

    def _evenly(self) -> dict[str, tuple[str, ...]]:
        return {
            "batch": (DATA,),
            "pages": (DATA,),
            "heads": (MODEL,),
            "groups": (MODEL,),
            "expert_columns": (MODEL,),
            "experts": (DATA,) if self.experts_over_data else (),
            "vocabulary": (MODEL,),
            "engram_rows": (DATA, MODEL),
            "engram_outputs": (MODEL,),
        }


@dataclass(frozen=True)
class Division:
    """A layout applied to a model. axes: mesh axes of each logical axis, () if every device holds
    all of it. notes: what is held whole or padded, and why.
    """

    cfg: Config
    layout: Layout
    axes: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]

    def ways(self, logical: str) -> int:
        """Number of parts a logical axis is cut into."""
        return prod(self.layout.mesh_shape[axis] for axis in self.axes[logical])

    def partition(self, path: str) -> tuple[tuple[str, ...] | None, ...]:
        """Mesh axes of each dim of a parameter (codes and scales alike), None for a whole dim; ()
        for a parameter that every device holds whole. Made for ``PartitionSpec(*partition)``.
        """
        return tuple(self.axes[dim] or None if dim else None for dim in logical_dims(path))

    def padded(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of a parameter (of codes or scales), its dims padded to a multiple of their
        parts.
        """
        ways = self._ways(path, len(shape))
        return tuple(-(-n // parts) * parts for n, parts in zip(shape, ways, strict=True))

    def local_specs(self, parameters: Iterable[Parameter]) -> dict[str, TensorSpec]:
        """What every device holds: path -> stored shape of its part, padding included, a scale
        under its own name. Stacked experts keep their leading axis.
        """
        found = {}
        for parameter in parameters:
            path = parameter.path
            stack = (len(parameter.weights),) if parameter.stacked else ()
            stored = {path: parameter.spec}
            if parameter.scale:
                stored[scale_name(path)] = parameter.scale
            for name, spec in stored.items():
                whole = self.padded(path, (*stack, *spec.shape))
                ways = self._ways(path, len(whole))
                shape = tuple(n // parts for n, parts in zip(whole, ways, strict=True))
                found[name] = TensorSpec(spec.dtype, shape, spec.part)
        return found

    def _ways(self, path: str, rank: int) -> list[int]:
        ways = [self.ways(dim) if dim else 1 for dim in logical_dims(path)]
        return ways + [1] * (rank - len(ways))


def logical_dims(path: str) -> tuple[str | None, ...]:
    """Logical axis of each dim of a parameter, None for a dim that is never split; () if none
    is.
    """
    if path in _ROOT_SPLITS:
        return _ROOT_SPLITS[path]
    return next((dims for end, dims in _SPLITS.items() if path.endswith(end)), ())


def layout(name: str) -> Layout:
    """The layout of that name; UserError that lists what exists."""
    if name not in LAYOUTS:
        raise UserError(f"layout {name!r}: must be one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


@dataclass(frozen=True)
class _Axis:
    """An extent that a logical axis splits. block: of it, one scale covers (1: no scales).
    required: refused if it does not divide, else held whole.
    """

    name: str
    logical: str
    extent: int
    block: int
    required: bool


def _extents(cfg: Config) -> list[_Axis]:
    columns = cfg.o_groups * cfg.o_lora_rank
    extents = [
        _Axis("heads", "heads", cfg.num_attention_heads, 1, True),
        _Axis("head columns", "heads", cfg.attention_width, BLOCK, True),
        _Axis("vocabulary", "vocabulary", cfg.vocab_size, 1, True),
        _Axis("wo_a groups", "groups", cfg.o_groups, 1, False),
        _Axis("wo_a columns", "groups", columns, BLOCK, False),
        _Axis("expert columns", "expert_columns", cfg.moe_intermediate_size, BLOCK, False),
    ]
    if cfg.engram_layer_ids:
        outputs = (cfg.hc_mult + 1) * cfg.hidden_size
        extents.append(_Axis("Engram outputs", "engram_outputs", outputs, BLOCK, False))
    return extents


def _expert_counts(cfg: Config) -> list[tuple[str, int]]:
    drafts = [("draft experts", cfg.dspark_n_routed_experts)]
    return [("experts", cfg.n_routed_experts)] + (drafts if cfg.num_nextn_predict_layers else [])


def _named() -> dict[str, Layout]:
    found = [Layout(f"tp{n}", n, 1, False) for n in (1, 2, 4, 8)]
    found += [Layout(f"dep{n}", 1, n, True) for n in (2, 4, 8, 16, 32)]
    for n, m in ((2, 2), (2, 4), (2, 8), (2, 16), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4)):
        found += [Layout(f"tp{n}xdp{m}", n, m, False), Layout(f"tp{n}xdep{m}", n, m, True)]
    return {each.name: each for each in found}


LAYOUTS = _named()
