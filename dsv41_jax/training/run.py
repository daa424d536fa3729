"""The training loop: steps, records, checkpoints, resume."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from dsv41_jax import compiling
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.training.data import Batches, Corpus, held_out_batches
from dsv41_jax.training.initial import initial
from dsv41_jax.training.losses import Trainee, draft_starts
from dsv41_jax.training.ops import MIXED
from dsv41_jax.training.optimiser import (
    Recipe,
    balanced,
    optimiser,
    packed,
    unpacked,
)
from dsv41_jax.training.state import Checkpoints, TrainState
from pallas_kernels.numerics import Numerics

TIMED = (10, 30)  # steps over which a run with a time limit measures its speed
EVALUATION = 16  # batches of held-out text


@dataclass(frozen=True)
class Options:
    """rows: tokens of a sequence; count: sequences of a step. minutes: after which to stop and
    save. steps: all of them; None: as many as ``budget`` minutes hold (default: ``minutes``), the
    first compiling included. every: steps from one checkpoint to the next.
    """

    rows: int = 2048
    count: int = 16
    steps: int | None = None
    minutes: float | None = None
    budget: float | None = None
    seed: int = 0
    every: int = 500
    remat: bool = False
    numerics: Numerics = MIXED
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None and self.budget is None:
            raise UserError("either steps or minutes must be given")

    @property
    def seconds(self) -> float:
        """Of the whole run, where its steps are not given."""
        return 60 * (self.budget or self.minutes or 0.0)


class Run:
    """A run in a directory. ``train`` goes on to its last step, or to the end of its minutes."""

    def __init__(
        self, cfg: Config, token_map: np.ndarray, corpus: Corpus, out: Path, options: Options
    ):
        self.cfg, self.corpus, self.options, self.out = cfg, corpus, options, out
        self.trainee = Trainee(cfg, token_map, options.numerics, remat=options.remat)
        self.batches = Batches(corpus.train, options.rows, options.count, options.seed)
        self.rules = optimiser(options.recipe)
        self.checkpoints = Checkpoints(out)
        self.state = self._start()
        self.record: dict[str, Any] = {
            "data": corpus.digest,
            "seed": options.seed,
            "rows": options.rows,
            "count": options.count,
            "steps": options.steps,
            "tokens_a_step": options.rows * options.count,
            "recipe": asdict(options.recipe),
            "log": [],
        }
        self._step = compiling.jit(self._one_step, donate=(0,))
        self._nats = compiling.jit(self.trainee.token_nats)

    def resume(self) -> None:
        """Go on from the newest checkpoint; UserError if it is of other data, seed or sizes."""
        self.state, record = self.checkpoints.newest(self.state)
        for key in ("data", "seed", "rows", "count", "recipe"):
            if record[key] != self.record[key]:
                raise UserError(f"{key}: the run has {record[key]!r}, not {self.record[key]!r}")
        if self.options.steps not in (None, record["steps"]):
            raise UserError(f"steps: the run has {record['steps']}, not {self.options.steps}")
        self.record = record

    def train(self, stop: Callable[[int], bool] = lambda _step: False) -> bool:
        """Train, saving at intervals and at the end; whether the last step was reached. ``stop``
        is asked after each step.
        """
        begin, timed = time.monotonic(), 0.0
        limit = None if self.options.minutes is None else begin + 60 * self.options.minutes
        done = int(self.state.step)
        with tqdm(total=self.record["steps"], initial=done, unit="step", mininterval=5) as bar:
            while self.record["steps"] is None or done < self.record["steps"]:
                if self.record["steps"] is None and done in TIMED:
                    jax.block_until_ready(self.state)
                    timed, before = time.monotonic(), timed
                    if done == TIMED[1]:
                        left = begin + self.options.seconds - timed
                        self.record["steps"] = bar.total = affordable(timed - before, left)
                metrics = self._advance(done)
                done += 1
                bar.update()
                if done % 20 == 0 or done in (1, self.record["steps"]):
                    self._note(done, metrics, bar)
                late = limit is not None and self.record["steps"] and time.monotonic() > limit
                if stop(done) or late:
                    break
                if done % self.options.every == 0:
                    self._save()
        self.record["seconds"] = self.record.get("seconds", 0.0) + time.monotonic() - begin
        self._save()
        return done == self.record["steps"]

    def evaluate(self) -> dict[str, float]:
        """Held-out perplexity with the master weights, and with weights and caches rounded as the
        release stores them.
        """
        batches = held_out_batches(
            self.corpus.held_out, self.options.rows, self.options.count, EVALUATION
        )
        found: dict[str, float] = {}
        for name, rounded in (("plain", False), ("rounded", True)):
            on = jnp.asarray(rounded)
            nats = [float(self._nats(self.state.values, tokens, on)) for tokens in batches]
            found[f"{name}_perplexity"] = float(np.exp(np.mean(nats)))
        found["tokens"] = len(batches) * self.options.rows * self.options.count
        return found

    def finish(self) -> None:
        """record.json beside the checkpoints."""
        text = json.dumps(self.record, indent=1)
        (self.out / "record.json").write_text(text + "\n", "utf-8")

    def close(self) -> None:
        self.checkpoints.close()

    def _start(self) -> TrainState:
        shapes = {path: leaf.get_value().shape for path, (_, leaf) in self.trainee.slots.items()}
        drawn = initial(shapes, self.cfg.num_hidden_layers, self.options.seed)
        values = {path: jnp.asarray(value) for path, value in drawn.items()}
        state = TrainState(values, self.rules.init(packed(values)), jnp.zeros((), jnp.int32))
        # As a restored state is, so that one program takes both.
        return jax.device_put(state, jax.devices()[0])

    def _advance(self, done: int) -> dict[str, jax.Array]:
        phase = self.options.recipe.at(done, self.record["steps"] or 10**9)
        self.state, metrics = self._step(self.state, self.batches.step(done), phase)
        return metrics

    def _one_step(
        self, state: TrainState, tokens: jax.Array, phase: dict[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        rounded = phase["rounded"] if self.options.recipe.rounded else None
        start = draft_starts(self.cfg, tokens.shape[1] - 1, state.step, self.options.seed)

        def total(values: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
            losses, loads = self.trainee.losses(values, tokens, start, phase["dense"], rounded)
            return losses.total, (losses, loads)

        grads, (losses, loads) = jax.grad(total, has_aux=True)(state.values)
        groups = packed(state.values)
        updates, inner = self.rules.update(packed(grads), state.optimiser, groups)
        groups = jax.tree.map(lambda old, update: old + phase["rate"] * update, groups, updates)
        values = balanced(unpacked(groups, state.values), loads, phase["balance"])
        uneven = [jnp.max(load) / jnp.mean(load) for load in loads.values()]
        metrics = {
            **{name: getattr(losses, name) for name in ("token", "index", "draft", "confidence")},
            "gradient": optax.tree.norm(grads),
            "busiest": jnp.max(jnp.stack(uneven)),
        }
        return replace(state, values=values, optimiser=inner, step=state.step + 1), metrics

    def _note(self, done: int, metrics: dict[str, jax.Array], bar: tqdm) -> None:
        values = {name: round(float(value), 5) for name, value in metrics.items()}
        if not np.isfinite(values["token"]):
            raise UserError(f"step {done}: the loss is {values['token']}")
        self.record["log"].append({"step": done, **values})
        bar.set_postfix({name: f"{values[name]:.3f}" for name in ("token", "index", "draft")})

    def _save(self) -> None:
        self.checkpoints.save(self.state, self.record)


def affordable(seconds: float, left: float) -> int:
    """Steps in all that fit the seconds left, at the speed of those timed; a twentieth is kept for
    saving.
    """
    each = seconds / (TIMED[1] - TIMED[0])
    return TIMED[1] + max(1, int(0.95 * left / each))
