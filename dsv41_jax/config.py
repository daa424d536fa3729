"""The released config.json (ARCHITECTURE section 1) as one frozen, checked dataclass."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dsv41_jax.config_rules import check_values, primes_from
from dsv41_jax.errors import UserError, raise_problems, shorten

PRESETS = ("flash", "mini", "tiny")

_TOP_LEVEL = {
    "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "transformers_version",
}  # fmt: skip
_ROPE_KEYS = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_max_position": "original_max_position_embeddings",
}
# Keys that have one supported value; they are checked, not stored.
_FIXED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.tie_word_embeddings": False,
    "text_config.rope_scaling.rope_type": "yarn",
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "vision_config.model_type": "deepseek_v41_vision",
}
_SECTIONS = ("quantization_config", "text_config", "text_config.rope_scaling", "vision_config")


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config` under its released names; num_hidden_layers 0 means no vision tower."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class Config:
    """Every number of the model, under the released `text_config` names.

    Lists are tuples, `rope_scaling` is flattened to rope_factor, rope_beta_fast, rope_beta_slow and
    rope_original_max_position, and the top-level token ids stand beside them. Construction (also
    `dataclasses.replace`) checks types, ranges and how the fields fit together, and raises one
    UserError that lists every field at fault, its value and what is allowed.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_position: int
    compress_rope_theta: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig
    transformers_version: str = "5.6.0"

    def __post_init__(self) -> None:
        values = {name: _plain(getattr(self, name)) for name in _CONFIG_TYPES}
        values |= {f"vision.{name}": _plain(getattr(self.vision, name)) for name in _VISION_TYPES}
        problems = check_values(values, _TYPES, _PATHS)
        if problems:
            raise_problems("config", problems)

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> "Config":
        """Read a released config.json (a path, or the parsed object).

        Missing keys and unsupported values are collected into one UserError; unknown keys give
        one warning that lists them all.
        """
        if isinstance(source, Mapping):
            document, subject = source, "config"
        else:
            document, subject = _read_json(Path(source)), str(source)
        return _parse(document, subject)

    @classmethod
    def preset(cls, name: str) -> "Config":
        """The released configuration ("flash") or the golden checkpoint's ("tiny")."""
        if name not in PRESETS:
            raise UserError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
        text = resources.files("dsv41_jax").joinpath(f"presets/{name}.json").read_text("utf-8")
        return cls.from_json(json.loads(text))

    def to_json_dict(self) -> dict[str, Any]:
        """The released nested schema; `from_json(cfg.to_json_dict()) == cfg`."""
        document: dict[str, Any] = {}
        leaves = dict(_FIXED)
        leaves |= {path: _plain(getattr(self, name)) for name, path in _TEXT_PATHS.items()}
        leaves |= {f"vision_config.{name}": getattr(self.vision, name) for name in _VISION_TYPES}
        for path, value in leaves.items():
            *parents, key = path.split(".")
            target = document
            for parent in parents:
                target = target.setdefault(parent, {})
            target[key] = value
        return document

    @property
    def last_kv_source(self) -> int:
        """Number of the last layer that runs on every prompt row (20 in the release)."""
        return self.kv_source_layer_ids[-1]

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def o_group_width(self) -> int:
        """Inputs of one output-projection group."""
        return self.attention_width // self.o_groups

    @property
    def hc_width(self) -> int:
        """Width of the flattened residual streams."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_mixes(self) -> int:
        """Rows of hc_*_fn: pre and post of each stream, and the stream-by-stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def engram_columns(self) -> int:
        """Table rows one token looks up in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_width(self) -> int:
        """Width of the concatenated rows of one token."""
        return self.engram_columns * self.engram_head_dim

    @property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Table sizes [Engram layer][n-gram size - 2][head] (ARCHITECTURE 9.2)."""
        heads, columns = self.engram_n_heads, self.engram_columns
        primes = primes_from(self.engram_vocab_size, columns * len(self.engram_layer_ids))
        return tuple(
            tuple(primes[i : i + heads] for i in range(layer, layer + columns, heads))
            for layer in range(0, len(primes), columns)
        )


_CONFIG_TYPES = {f.name: f.type for f in dataclasses.fields(Config) if f.name != "vision"}
_VISION_TYPES = {f.name: f.type for f in dataclasses.fields(VisionConfig)}


def _text_path(name: str) -> str:
    if name in _TOP_LEVEL:
        return name
    if name in _ROPE_KEYS:
        return f"text_config.rope_scaling.{_ROPE_KEYS[name]}"
    return f"text_config.{name}"


_TEXT_PATHS = {name: _text_path(name) for name in _CONFIG_TYPES}
_PATHS = _TEXT_PATHS | {f"vision.{name}": f"vision_config.{name}" for name in _VISION_TYPES}
_TYPES = _CONFIG_TYPES | {f"vision.{name}": kind for name, kind in _VISION_TYPES.items()}


def _equal(value: Any, allowed: Any) -> bool:
    # 1 == True in Python, not in JSON.
    return type(value) is type(allowed) and value == allowed


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not a JSON file in UTF-8: {error}") from error


def _parse(document: Any, subject: str) -> Config:
    if not isinstance(document, Mapping):
        raise UserError(f"{subject}: must be a JSON object, not {type(document).__name__}")
    leaves, problems = _flatten(document)
    broken = tuple(problem.split(" ")[0] + "." for problem in problems)
    absent = [
        path for path in (*_FIXED, *_PATHS.values())
        if path not in leaves and not path.startswith(broken) and path != "transformers_version"
    ]  # fmt: skip
    problems += [f"{path}: is missing" for path in absent]
    problems += [
        f"{path} = {shorten(leaves[path])}: must be {json.dumps(allowed)}"
        for path, allowed in _FIXED.items()
        if path in leaves and not _equal(leaves[path], allowed)
    ]
    values = {name: leaves[path] for name, path in _PATHS.items() if path in leaves}
    problems += check_values(values, _TYPES, _PATHS)
    if problems:
        raise_problems(subject, problems)
    unknown = sorted(leaves.keys() - _FIXED.keys() - set(_PATHS.values()))
    if unknown:
        warnings.warn(f"{subject}: ignored unknown keys: {', '.join(unknown)}", stacklevel=3)
    ready: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }
    vision = VisionConfig(**{name: ready.pop(f"vision.{name}") for name in _VISION_TYPES})
    return Config(vision=vision, **ready)


def _flatten(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Dotted path -> value for the known sections, and the sections that are no objects."""
    leaves = {str(key): value for key, value in document.items()}
    problems = []
    for section in _SECTIONS:
        if section not in leaves:
            continue
        inner = leaves.pop(section)
        if isinstance(inner, Mapping):
            leaves |= {f"{section}.{key}": value for key, value in inner.items()}
        else:
            problems.append(f"{section} = {shorten(inner)}: must be an object")
    return leaves, problems
