"""Times of dispatched work: warm-up, median, spread, and whether a buffer moved."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_WARM_UP, _SAMPLES, _FEWEST = 3, 9, 3
_SAMPLE_S, _BUDGET_S, _MOST_RUNS = 0.25, 4.0, 100
_AHEAD = 2  # runs before those of a sample


@dataclass(frozen=True)
class Timing:
    """us: the median over samples; spread_pct: from the fastest to the slowest of them, in percent
    of it. host_pct: dispatch in percent of that time; near 100 and above the host is what was
    measured.
    """

    us: float
    spread_pct: float
    samples: int
    host_pct: float

    def divided(self, count: int) -> "Timing":
        """Of one of ``count`` equal parts."""
        return Timing(self.us / count, self.spread_pct, self.samples, self.host_pct)


def timed(step: Callable[[], Any], *, latency: bool = False, most: int | None = None) -> Timing:
    """step() dispatches the work once and returns what to wait for. latency: wait after each run;
    otherwise runs follow one another as an engine's steps do. most: runs in all, a dozen at least.
    Where the host is slower than the device, the time of one run in ``_MOST_RUNS`` may be missing.
    """
    once = 0.0
    jax.block_until_ready(_marker())
    for _ in range(_WARM_UP):
        began = time.perf_counter()
        jax.block_until_ready(step())
        once = time.perf_counter() - began
    ahead = 0 if latency else _AHEAD
    left = 10**9 if most is None else most - _WARM_UP
    some = left // _FEWEST - ahead
    runs = 1 if latency else max(1, min(_MOST_RUNS, some, round(_SAMPLE_S / once)))
    samples = max(
        _FEWEST, min(_SAMPLES, left // (runs + ahead), int(_BUDGET_S / once / (runs + ahead)))
    )
    sample = _one if latency else _following
    times, dispatched = zip(*(sample(step, runs) for _ in range(samples)), strict=True)
    us = statistics.median(times) * 1e6
    return Timing(
        us=us,
        spread_pct=100 * (max(times) - min(times)) * 1e6 / us,
        samples=samples,
        host_pct=100 * statistics.median(dispatched) * 1e6 / us,
    )


def _one(step: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Seconds of a run, and of its dispatch."""
    assert runs == 1
    began = time.perf_counter()
    out = step()
    dispatched = time.perf_counter() - began
    jax.block_until_ready(out)
    return time.perf_counter() - began, dispatched


def _following(step: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Seconds a run, and of its dispatch, from the end of a run on behind which another waits: an
    idle device would wait for the first dispatch.
    """
    step()
    ended = _marker()
    step()
    jax.block_until_ready(ended)
    began, out = time.perf_counter(), None
    for _ in range(runs):
        out = None  # or the next run's results would get other addresses
        out = step()
    dispatched = (time.perf_counter() - began) / runs
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / (runs + 1), dispatched


@jax.jit
def _marker() -> jax.Array:
    """Ready when all is that was dispatched to its device before."""
    return jnp.zeros(())


def addresses(tree: Any) -> list[int]:
    """Where every array of this process lies."""
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
