"""Named layouts: which mesh axes each logical axis of the model is split over.

A layout is a mesh of ``data`` x ``model`` devices. ``tpN`` splits heads, output-projection groups,
expert columns and the vocabulary over N. ``depN`` gives each of N ranks its own requests and pages
and spreads whole experts over the ranks. ``tpNxdpM`` is M copies of ``tpN``, ``tpNxdepM`` spreads
whole experts over M groups of N, their columns inside a group. Engram rows are always spread over
all devices (ARCHITECTURE section 9), padded to a multiple of them.
"""

from collections.abc import Iterable
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

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over; () if every device holds all of it."""
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
        }[logical]

    def ways(self, logical: str) -> int:
        """Number of parts a logical axis is cut into."""
        return prod(self.mesh_shape[axis] for axis in self.mesh_axes(logical))

    def partition(self, path: str) -> tuple[tuple[str, ...] | None, ...]:
        """Mesh axes of each dim of a parameter (codes and scales alike), None for a whole dim; ()
        for a parameter that every device holds whole. Made for ``PartitionSpec(*partition)``.
        """
        return tuple(self.mesh_axes(dim) or None if dim else None for dim in logical_dims(path))

    def check(self, cfg: Config) -> None:
        """UserError that names every axis which does not divide, its extent and the divisor."""
        problems = [
            f"{axis} = {extent}{_blocks(block)}: must be divisible by {self.ways(logical) * block}"
            for axis, logical, extent, block in _extents(cfg)
            if extent % (self.ways(logical) * block)
        ]
        if problems:
            raise UserError(f"layout {self.name}: {'; '.join(problems)}", problems)

    def local_specs(self, parameters: Iterable[Parameter]) -> dict[str, TensorSpec]:
        """What the fullest device holds: path -> stored shape of its part, a scale under its own
        name. Stacked experts keep their leading axis.
        """
        found = {}
        for parameter in parameters:
            ways = [self.ways(dim) if dim else 1 for dim in logical_dims(parameter.path)]
            stack = (len(parameter.weights),) if parameter.stacked else ()
            stored = {parameter.path: parameter.spec}
            if parameter.scale:
                stored[scale_name(parameter.path)] = parameter.scale
            for name, spec in stored.items():
                shape = _shares((*stack, *spec.shape), ways)
                found[name] = TensorSpec(spec.dtype, shape, spec.part)
        return found


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


def _extents(cfg: Config) -> list[tuple[str, str, int, int]]:
    """Name, logical axis, extent, and the block of it that one scale covers (1: no scales)."""
    extents = [
        ("heads", "heads", cfg.num_attention_heads, 1),
        ("head columns", "heads", cfg.attention_width, BLOCK),
        ("wo_a groups", "groups", cfg.o_groups, 1),
        ("wo_a columns", "groups", cfg.o_groups * cfg.o_lora_rank, BLOCK),
        ("experts", "experts", cfg.n_routed_experts, 1),
        ("expert columns", "expert_columns", cfg.moe_intermediate_size, BLOCK),
        ("vocabulary", "vocabulary", cfg.vocab_size, 1),
    ]
    if cfg.num_nextn_predict_layers:
        extents.append(("draft experts", "experts", cfg.dspark_n_routed_experts, 1))
    if cfg.engram_layer_ids:
        outputs = (cfg.hc_mult + 1) * cfg.hidden_size
        extents.append(("Engram outputs", "engram_outputs", outputs, BLOCK))
    return extents


def _blocks(block: int) -> str:
    return f" (blocks of {block})" if block > 1 else ""


def _shares(shape: tuple[int, ...], ways: list[int]) -> tuple[int, ...]:
    ways = ways + [1] * (len(shape) - len(ways))
    return tuple(-(-extent // parts) for extent, parts in zip(shape, ways, strict=True))


def _named() -> dict[str, Layout]:
    found = [Layout(f"tp{n}", n, 1, False) for n in (1, 2, 4, 8)]
    found += [Layout(f"dep{n}", 1, n, True) for n in (2, 4, 8, 16, 32)]
    for n, m in ((2, 2), (2, 4), (2, 8), (2, 16), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4)):
        found += [Layout(f"tp{n}xdp{m}", n, m, False), Layout(f"tp{n}xdep{m}", n, m, True)]
    return {each.name: each for each in found}


LAYOUTS = _named()
