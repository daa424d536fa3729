"""The tensors a released checkpoint holds: names, dtypes and shapes from the config alone.

Implements ARCHITECTURE section 2; for the preset "flash" the totals are those of section 14.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from dsv41_jax.config import Config

Part = Literal["text", "mtp", "vision"]
BLOCK = 32
ITEM_BYTES = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor: dtype as safetensors spells it, stored shape, part of the model."""

    dtype: str
    shape: tuple[int, ...]
    part: Part

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Logical elements: two for each byte of packed FP4, none for a scale."""
        return prod(self.shape) * {"I8": 2, "F8_E8M0": 0}.get(self.dtype, 1)


@dataclass(frozen=True)
class Totals:
    tensors: int
    parameters: int
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> "Totals":
        specs = list(specs)
        return cls(len(specs), sum(s.parameters for s in specs), sum(s.nbytes for s in specs))


def scale_name(weight: str) -> str:
    """`a.b.weight` -> `a.b.scale`."""
    return weight.removesuffix("weight") + "scale"


def inventory(cfg: Config) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor of the checkpoint that `cfg` implies, in a fixed order.

    The vision part is empty when the vision tower has no layers.
    """
    text, mtp = _Builder("text"), _Builder("mtp")
    text.add("BF16", "embed.weight", cfg.vocab_size, cfg.hidden_size)
    for i in range(cfg.num_hidden_layers):
        _block(text, f"layers.{i}.", cfg, cfg.n_routed_experts)
        _attention_extras(text, f"layers.{i}.attn.", cfg, i)
        if i in cfg.engram_layer_ids:
            _engram(text, f"layers.{i}.engram.", cfg, i)
    text.add("BF16", "norm.weight", cfg.hidden_size)
    text.add("BF16", "head.weight", cfg.vocab_size, cfg.hidden_size)
    for i in range(cfg.num_nextn_predict_layers):
        _block(mtp, f"mtp.{i}.", cfg, cfg.dspark_n_routed_experts)
    if cfg.num_nextn_predict_layers:
        _draft_ends(mtp, cfg)
    vision = vision_inventory(cfg) if cfg.vision.num_hidden_layers else {}
    return text.specs | mtp.specs | vision


def vision_inventory(cfg: Config) -> dict[str, TensorSpec]:
    """The `vision.*`, `aligner.*` and `image_*` tensors (ARCHITECTURE 2.1 and 2.4)."""
    build, tower, width = _Builder("vision"), cfg.vision, cfg.hidden_size
    hidden = tower.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        build.add("BF16", name, width)
    build.biased("vision.patch_embed.proj", hidden, 3 * tower.patch_size**2)
    for i in range(tower.num_hidden_layers):
        block = f"vision.blocks.{i}."
        build.biased(f"{block}attn.wqkv", 3 * hidden, hidden)
        build.biased(f"{block}attn.wo", hidden, hidden)
        build.add("BF16", f"{block}mlp.w1.weight", 2 * tower.intermediate_size, hidden)
        build.add("BF16", f"{block}mlp.w2.weight", hidden, tower.intermediate_size)
        build.add("BF16", f"{block}norm1.weight", hidden)
        build.add("BF16", f"{block}norm2.weight", hidden)
    build.add("BF16", "vision.norm.weight", hidden)
    build.biased("aligner.w1", width, hidden * tower.downsample_ratio**2)
    build.biased("aligner.w2", width, width)
    return build.specs


class _Builder:
    def __init__(self, part: Part) -> None:
        self.part: Part = part
        self.specs: dict[str, TensorSpec] = {}

    def add(self, dtype: str, name: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(dtype, shape, self.part)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self.add("F8_E4M3", f"{name}.weight", rows, columns)
        self.add("F8_E8M0", f"{name}.scale", -(-rows // BLOCK), -(-columns // BLOCK))

    def fp4(self, name: str, rows: int, columns: int) -> None:
        self.add("I8", f"{name}.weight", rows, columns // 2)
        self.add("F8_E8M0", f"{name}.scale", rows, columns // BLOCK)

    def biased(self, name: str, rows: int, columns: int) -> None:
        self.add("BF16", f"{name}.weight", rows, columns)
        self.add("BF16", f"{name}.bias", rows)


def _block(build: _Builder, at: str, cfg: Config, experts: int) -> None:
    """What every layer and every draft stage holds (ARCHITECTURE 2.2)."""
    width, inner = cfg.hidden_size, cfg.moe_intermediate_size
    build.fp8(f"{at}attn.wq_a", cfg.q_lora_rank, width)
    build.add("BF16", f"{at}attn.q_norm.weight", cfg.q_lora_rank)
    build.fp8(f"{at}attn.wq_b", cfg.attention_width, cfg.q_lora_rank)
    build.fp8(f"{at}attn.wkv", cfg.head_dim, width)
    build.add("BF16", f"{at}attn.kv_norm.weight", cfg.head_dim)
    build.add("F32", f"{at}attn.attn_sink", cfg.num_attention_heads)
    build.fp8(f"{at}attn.wo_a", cfg.o_groups * cfg.o_lora_rank, cfg.o_group_width)
    build.fp8(f"{at}attn.wo_b", width, cfg.o_groups * cfg.o_lora_rank)
    for half in ("attn", "ffn"):
        build.add("BF16", f"{at}{half}_norm.weight", width)
        build.add("F32", f"{at}hc_{half}_fn", cfg.hc_mixes, cfg.hc_width)
        build.add("F32", f"{at}hc_{half}_base", cfg.hc_mixes)
        build.add("F32", f"{at}hc_{half}_scale", 3)
    build.add("BF16", f"{at}ffn.gate.weight", experts, width)
    build.add("F32", f"{at}ffn.gate.bias", experts)
    build.add("F32", f"{at}ffn.gate.bias_vl", experts)
    for e in range(experts):
        build.fp4(f"{at}ffn.experts.{e}.w1", inner, width)
        build.fp4(f"{at}ffn.experts.{e}.w2", width, inner)
        build.fp4(f"{at}ffn.experts.{e}.w3", inner, width)
    build.fp8(f"{at}ffn.shared_experts.w1", inner, width)
    build.fp8(f"{at}ffn.shared_experts.w2", width, inner)
    build.fp8(f"{at}ffn.shared_experts.w3", inner, width)


def _attention_extras(build: _Builder, at: str, cfg: Config, layer: int) -> None:
    """Compressor and indexer of the layers that own one (ARCHITECTURE 2.3)."""
    if layer in cfg.kv_source_layer_ids:
        build.add("BF16", f"{at}compressor.wkv.weight", cfg.head_dim, cfg.hidden_size)
        if cfg.compress_ratios[layer] == 2:
            build.add("BF16", f"{at}compressor.wgate.weight", cfg.head_dim, cfg.hidden_size)
        build.add("BF16", f"{at}compressor.norm.weight", cfg.head_dim)
    if layer in cfg.index_source_layer_ids:
        build.fp8(f"{at}indexer.wq_b", cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank)
        build.add("BF16", f"{at}indexer.weights_proj.weight", cfg.index_n_heads, cfg.hidden_size)
    if layer in cfg.kv_source_layer_ids:
        build.add("BF16", f"{at}indexer.wk.weight", cfg.index_head_dim, cfg.head_dim)
        build.add("BF16", f"{at}indexer.k_norm.weight", cfg.index_head_dim)


def _engram(build: _Builder, at: str, cfg: Config, layer: int) -> None:
    rows = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer)]
    build.add("F8_E4M3", f"{at}embed.weight", rows, cfg.engram_head_dim)
    build.add("F8_E8M0", f"{at}embed.scale", rows, cfg.engram_head_dim // BLOCK)
    build.fp8(f"{at}wkv", (cfg.hc_mult + 1) * cfg.hidden_size, cfg.engram_width)
    build.add("BF16", f"{at}q_weight", cfg.hc_mult, cfg.hidden_size)
    build.add("BF16", f"{at}k_weight", cfg.hc_mult, cfg.hidden_size)


def _draft_ends(build: _Builder, cfg: Config) -> None:
    """What only the first and the last draft stage hold."""
    last, rank = f"mtp.{cfg.num_nextn_predict_layers - 1}.", cfg.dspark_markov_rank
    build.fp8(
        "mtp.0.main_proj", cfg.hidden_size, len(cfg.dspark_target_layer_ids) * cfg.hidden_size
    )
    build.add("BF16", "mtp.0.main_norm.weight", cfg.hidden_size)
    build.add("BF16", f"{last}norm.weight", cfg.hidden_size)
    build.add("BF16", f"{last}markov_head.embed.weight", cfg.vocab_size, rank)
    build.add("BF16", f"{last}markov_head.head.weight", cfg.vocab_size, rank)
    build.add("BF16", f"{last}confidence_head.proj.weight", 1, cfg.hidden_size + rank)
