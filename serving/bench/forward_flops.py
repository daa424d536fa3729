"""Floating-point operations of measured prompts, and the rate of bf16 matrix products beside them.

Counted is what the algorithm needs of matrix products: of every row of a dispatch the projections,
the router, the shared expert and as many experts as it picks; attention over the rows that it sees
and index scores of the entries that it may pick (ARCHITECTURE sections 4 and 6); Engram's
projections; the head for the rows that are scored. Index keys count as if each row made one. Not
counted are the coefficients of mHC (0.2 %), what pads a tile, and all that is no product.
"""

import statistics
import time
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.layer_plan import LayerPlan, layer_plan
from serving.bench.forward_cases import Case, Dispatch
from serving.bench.forward_floor import Floors
from serving.bench.forward_inputs import layer_rows
from sharding.estimate import ShardedModel
from sharding.layouts import layout
from sharding.roofline import Weights

PROMPTS = ("prefill", "replay")  # phases that are compared with the rate
_EVERY_ROW = ("dense", "index_weights", "gate", "shared", "engram")
_SIDE, _CPU_SIDE = 8192, 256
_RUNS, _SAMPLES, _WARM_UP = 6, 5, 3


def tflop(floors: Floors, case: Case, plan: list[Dispatch]) -> float:
    """10^12 operations of a case's dispatches, on all data ranks together."""
    total = sum(_dispatch(floors, dispatch, case.replay) for dispatch in plan)
    return total * floors.sets.placement.division.ways("batch") / 1e12


@lru_cache
def _weights(cfg: Config) -> Weights:
    return ShardedModel(cfg, layout("tp1")).weights


def _dispatch(floors: Floors, dispatch: Dispatch, replay: bool) -> int:
    cfg, every = floors.sets.cfg, layer_plan(floors.sets.cfg)
    weights, rows, total = _weights(cfg), layer_rows(cfg, dispatch, replay), 0
    for index in floors.layers(dispatch):
        after = index > cfg.last_kv_source
        lowest = np.maximum(rows.floor, rows.decoder_floor) if after else rows.floor
        for start, length, floor in zip(rows.start, rows.length, lowest, strict=True):
            positions = np.arange(start, start + length, dtype=np.int64)
            total += _layer(cfg, weights, every[index], positions, int(floor))
    scored = 0 if dispatch.program == "encode" else dispatch.bucket.requests
    return total + 2 * scored * weights[-1, "head"].parameters


def _layer(
    cfg: Config, weights: Weights, layer: LayerPlan, positions: np.ndarray, floor: int
) -> int:
    """Of a request's rows, whose windows see nothing below a floor."""
    held = {name: weights.get((layer.index, name)) for name in _EVERY_ROW}
    each = sum(group.parameters for group in held.values() if group)
    picked = weights[layer.index, "experts"].parameters // cfg.n_routed_experts
    each += picked * cfg.num_experts_per_tok
    seen = np.minimum(positions - floor + 1, cfg.sliding_window).sum()
    scanned = 0
    if layer.ratio:
        visible = (positions + 1) // layer.ratio
        seen += np.minimum(visible, cfg.index_topk).sum()
        if layer.selects:
            most = cfg.candidate_topk_blocks * cfg.candidate_block_size
            scanned = (np.minimum(visible, most) if layer.restricted else visible).sum()
    products = 2 * each * len(positions) + 4 * cfg.attention_width * int(seen)
    return products + 2 * cfg.index_n_heads * cfg.index_head_dim * int(scanned)


def matmul_tflops() -> float:
    """10^12 operations a second of a bf16 product of square matrices on one device, the median of
    samples of some milliseconds.
    """
    side = _SIDE if jax.default_backend() == "gpu" else _CPU_SIDE
    a, b = (
        jax.random.normal(jax.random.key(seed), (side, side), jnp.bfloat16) for seed in range(2)
    )
    product, times = jit(jnp.matmul), []
    for sample in range(_WARM_UP + _SAMPLES):
        jax.block_until_ready((a, b))
        began, out = time.perf_counter(), a
        for _ in range(_RUNS):
            out = product(a, b)
        jax.block_until_ready(out)
        if sample >= _WARM_UP:
            times.append((time.perf_counter() - began) / _RUNS)
    return 2 * side**3 / statistics.median(times) / 1e12


def share_pct(operations: float, us: float, rate: float) -> float:
    """Percent of a rate in 10^12 a second that so many 10^12 operations reach."""
    return 100 * operations / (us / 1e6) / rate
