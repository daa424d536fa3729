"""What fits where: bytes of a model by kind, and how many tokens of cache remain per GPU.

A first answer for `inspect`, from sizes alone; `sharding` estimates real layouts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsv41_jax.checkpoint.inventory import TensorSpec
from dsv41_jax.config import Config

GPU_BYTES = 141 * 10**9
GPU_COUNTS = (1, 2, 4, 8)
RESERVED_FRACTION = 0.1
ASSUMPTIONS = (
    "weights spread evenly over the GPUs, head held as stored, draft "
    "stages loaded, vision skipped; 10 % of each GPU kept for activations, window rings and "
    "programs; each GPU caches its own requests"
)


@dataclass(frozen=True)
class ByKind:
    """Bytes in memory of a loaded model; `vision` is stored but never loaded."""

    experts: int
    dense: int
    engram_tables: int
    embedding: int
    head: int
    draft: int
    vision: int

    @property
    def loaded(self) -> int:
        return sum(asdict(self).values()) - self.vision


@dataclass(frozen=True)
class Fit:
    """One line of the answer; `kv_tokens` are those that fit beside the weights of one GPU."""

    gpus: int
    engram: str
    bytes_per_gpu: int
    host_bytes: int
    fits: bool
    kv_tokens: int

    def line(self, kv_bytes: float) -> str:
        where = "Engram in HBM" if self.engram == "device" else "Engram on the host"
        head = f"{self.gpus} x {GPU_BYTES / 1e9:.0f} GB, {where}: "
        head += f"{_size(self.bytes_per_gpu)} of weights a GPU"
        host = f", {_size(self.host_bytes)} in host memory or on disk"
        head += host if self.host_bytes else ""
        if not self.fits:
            return head + ": does not fit"
        return head + f": fits, {self.kv_tokens:,} tokens of KV per GPU at {kv_bytes:g} B"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.3f} MB"


def kv_bytes_per_token(cfg: Config) -> float:
    """Global cache bytes of one token: FP4 latent and FP4 index key of each KV owner (4.8)."""
    latent = cfg.head_dim // 2 + cfg.head_dim // 16
    key = cfg.index_head_dim // 2 + cfg.index_head_dim // 32
    return sum((latent + key) / cfg.compress_ratios[layer] for layer in cfg.kv_source_layer_ids)


def bytes_by_kind(specs: Mapping[str, TensorSpec]) -> ByKind:
    """Sum the tensors of an inventory, or of what a checkpoint holds."""
    sums = dict.fromkeys(ByKind.__dataclass_fields__, 0)
    for name, spec in specs.items():
        kind = _kind(name, spec)
        sums[kind] += spec.nbytes
    return ByKind(**sums)


def _kind(name: str, spec: TensorSpec) -> str:
    if spec.part != "text":
        return "vision" if spec.part == "vision" else "draft"
    if ".ffn.experts." in name:
        return "experts"
    if ".engram.embed." in name:
        return "engram_tables"
    return {"embed.weight": "embedding", "head.weight": "head"}.get(name, "dense")


def what_fits(cfg: Config, kinds: ByKind) -> list[Fit]:
    """For 1, 2, 4 and 8 GPUs of 141 GB, Engram tables in HBM and on the host."""
    usable = int(GPU_BYTES * (1 - RESERVED_FRACTION))
    kv_bytes = kv_bytes_per_token(cfg)
    fits = []
    for gpus in GPU_COUNTS:
        for engram in ("device", "host"):
            host = kinds.engram_tables if engram == "host" else 0
            share = -(-(kinds.loaded - host) // gpus)
            tokens = max(0, int((usable - share) / kv_bytes))
            fits.append(Fit(gpus, engram, share, host, share < usable, tokens))
    return fits


def fit_report(cfg: Config, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Bytes by kind, KV bytes a token, every Fit with its line, and the assumptions."""
    kinds, kv_bytes = bytes_by_kind(specs), kv_bytes_per_token(cfg)
    return {
        "bytes_by_kind": asdict(kinds),
        "kv_bytes_per_token": kv_bytes,
        "fits": [asdict(fit) | {"line": fit.line(kv_bytes)} for fit in what_fits(cfg, kinds)],
        "assumptions": ASSUMPTIONS,
    }
