"""Sampling by itself: what each option costs, and whether the search finds what a sort does.

python -m serving.bench sampling --batch 1,8,32,128
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.batch import neutral_sampling
from serving.bench.forward_time import timed
from serving.bench.table import report
from serving.filters import kept_by_search, kept_by_sort
from serving.sampler import Sampling, sample

OPTIONS: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, logprobs": {"reports": True},
    "penalties": {"frequency": 0.5},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k, top-p": {"temperature": 0.8, "top_k": 200, "top_p": 0.9},
}
LOGPROBS, BIAS_IDS, STOP_IDS, SPREAD = 20, 300, 8, 2.5
MOST_MOVED = 1e-5  # of sums of 129280 float32 numbers, whose order differs


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "sampling",
        help="what each sampling option costs a step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", default="1,8,32,128", metavar="N,N", help="rows of logits")
    parser.add_argument("--vocabulary", type=int, default=Config.preset("flash").vocab_size)
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """A row an option and batch; exit status 1 if search and sort keep ids of more probability
    apart than the rounding of their sums explains.
    """
    batches = arguments.batch.split(",")
    for text in batches:
        if not (text.isascii() and text.isdigit() and int(text)):
            raise UserError(f"--batch {text}: must be positive numbers")
    if arguments.vocabulary < LOGPROBS:
        raise UserError(f"--vocabulary {arguments.vocabulary} must be at least {LOGPROBS}")
    rows = [row for text in batches for row in _of_batch(int(text), arguments.vocabulary)]
    report(rows, arguments.json)
    if any(row["moved"] > MOST_MOVED for row in rows):
        raise SystemExit(1)


def _of_batch(batch: int, vocabulary: int) -> list[dict[str, Any]]:
    """One program for every option, as the engine has it."""
    logits = SPREAD * jax.random.normal(jax.random.key(batch), (batch, vocabulary), jnp.float32)
    counts = jnp.zeros((batch, vocabulary), jnp.int32)

    def draw(logits: Array, sampling: Sampling, position: Array, counts: Array) -> Any:
        return sample(logits, sampling, position, logprobs=LOGPROBS, counts=lambda: counts)

    program, moved, found = jit(draw), jit(lambda *given: _moved(*given)), []
    for name, values in OPTIONS.items():
        sampling = _sampling(batch, vocabulary, values)
        given = jax.device_put((logits, sampling, np.arange(batch, dtype=np.int32), counts))
        timing = timed(lambda given=given: program(*given))
        filtered = "top_k" in values or "top_p" in values
        heated = logits / values.get("temperature", 1)
        found.append(
            {
                "batch": batch,
                "vocabulary": vocabulary,
                "options": name,
                "us": round(timing.us, 1),
                "spread_pct": round(timing.spread_pct, 1),
                "host_pct": round(timing.host_pct, 1),
                "moved": float(moved(heated, sampling)) if filtered else 0.0,
            }
        )
    return found


def _sampling(batch: int, vocabulary: int, values: dict[str, float]) -> Sampling:
    sampling = neutral_sampling(batch, STOP_IDS, BIAS_IDS, vocabulary)
    sampling = replace(sampling, reports=np.zeros(batch, bool))
    for name, value in values.items():
        owner: Any = sampling if hasattr(sampling, name) else sampling.rules
        getattr(owner, name)[:] = value
    return sampling


def _moved(heated: Array, sampling: Sampling) -> Array:
    """The probability of the ids that only one of the two ways keeps, in the row with most."""
    scaled = heated - jnp.max(heated, axis=1, keepdims=True)
    given = scaled, sampling.top_k, sampling.top_p
    differ = kept_by_search(*given) != kept_by_sort(*given)
    return jnp.max(jnp.sum(jnp.where(differ, jax.nn.softmax(scaled, axis=1), 0), axis=1))
