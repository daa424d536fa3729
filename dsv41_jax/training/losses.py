"""What training minimises, and what it reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.training.drafts import drafts
from dsv41_jax.training.forward import backbone
from dsv41_jax.training.ops import training_ops
from dsv41_jax.training.rounding import Rounding, rounded_weights
from pallas_kernels.engram.hash import BARRIER
from pallas_kernels.numerics import FLOAT32, Numerics

STRIDE = 16  # tokens from one draft block to the next


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """Means in nats, float32 []: of the next token, of the index (over its layers), of drafted
    tokens (over a block), of the confidence.
    """

    token: Array
    index: Array
    draft: Array
    confidence: Array

    @property
    def total(self) -> Array:
        """Without weights: backbone, index and draft stages each learn from their own part."""
        return self.token + self.index + self.draft + self.confidence


class Trainee:
    """A model's structure without its values: losses as functions of named float32 parameters."""

    def __init__(self, cfg: Config, token_map: np.ndarray, numerics: Numerics, *, remat: bool):
        abstract = nnx.eval_shape(lambda: Model(cfg, numerics=FLOAT32, rngs=nnx.Rngs(0)))
        self.graph, params, derived = nnx.split(abstract, nnx.Param, ...)
        self.slots = {".".join(map(str, at)): (at, leaf) for at, leaf in nnx.to_flat_state(params)}
        known = np.full(cfg.vocab_size, BARRIER, np.int32)
        known[: len(token_map)] = token_map
        self.derived = jax.tree.map(lambda _: jnp.asarray(known), derived)
        self.cfg, self.numerics, self.remat = cfg, numerics, remat

    def model(self, values: Mapping[str, Any]) -> Model:
        """The model with these values at its parameters."""
        leaves = [(at, leaf.replace(values[path])) for path, (at, leaf) in self.slots.items()]
        return nnx.merge(self.graph, nnx.from_flat_state(leaves), self.derived)

    def losses(
        self,
        values: Mapping[str, Array],
        tokens: Array,
        start: Array,
        dense: Array,
        rounded: Array | None,
    ) -> tuple[Losses, dict[str, Array]]:
        """Of sequences int32 [B, T + 1] with draft blocks at ``start`` int32 [A]; and the rows
        that chose each expert, f32 [E] by the path of its gate's bias. rounded: as
        ``Rounding.on``.
        """
        model, ops, rounding = self._parts(values, rounded)
        main = backbone(model, ops, rounding, tokens[:, :-1], dense, remat=self.remat)
        token = token_loss(main.logits, tokens, self.cfg.bos_token_id)
        drafted = drafts(model, ops, rounding, tokens, main.taps, start)
        places = start[:, None] + jnp.arange(self.cfg.dspark_block_size)
        draft, confidence = draft_losses(
            drafted.logits, drafted.confidence, main.logits[:, places], tokens[:, places + 1]
        )
        attending = len(self.cfg.compress_ratios) - self.cfg.compress_ratios.count(0)
        loads = {f"layers.{i}.ffn.gate.bias": load for i, load in enumerate(main.loads)}
        loads |= {f"mtp.{i}.ffn.gate.bias": load for i, load in enumerate(drafted.loads)}
        return Losses(token, main.index_loss / attending, draft, confidence), loads

    def token_nats(
        self, values: Mapping[str, Array], tokens: Array, rounded: Array | None
    ) -> Array:
        """Mean next-token loss alone, float32 []."""
        model, ops, rounding = self._parts(values, rounded)
        logits = backbone(model, ops, rounding, tokens[:, :-1]).logits
        return token_loss(logits, tokens, self.cfg.bos_token_id)

    def _parts(
        self, values: Mapping[str, Array], rounded: Array | None
    ) -> tuple[Model, Ops, Rounding]:
        stored = values if rounded is None else rounded_weights(self.cfg, values, rounded)
        rounding = Rounding(rounded)
        return self.model(stored), training_ops(self.numerics, rounding), rounding


def token_loss(logits: Array, tokens: Array, bos: int) -> Array:
    """Mean negative log likelihood: logits [B, T, V] of tokens [B, T + 1]. Which document follows
    another is not for learning, so a BOS does not count.
    """
    target = tokens[:, 1:]
    counts = target != bos
    return jnp.sum(jnp.where(counts, _nll(logits, target), 0)) / jnp.maximum(jnp.sum(counts), 1)


def draft_losses(
    logits: Array, confidence: Array, main: Array, target: Array
) -> tuple[Array, Array]:
    """Of drafted logits and the backbone's own [B, A, n, V] for targets [B, A, n]; the confidence
    [B, A, n] learns the share of probability on which both agree, which is how often speculative
    sampling accepts.
    """
    fixed = jax.lax.stop_gradient((logits, main))
    p, q = (jax.nn.softmax(values, axis=-1) for values in fixed)
    agreed = jnp.sum(jnp.minimum(p, q), axis=-1)
    entropy = jax.nn.softplus(confidence) - agreed * confidence
    return jnp.mean(_nll(logits, target)), jnp.mean(entropy)


def _nll(logits: Array, target: Array) -> Array:
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def draft_starts(cfg: Config, rows: int, step: int, seed: int) -> Array:
    """Positions int32 [A] at which blocks open in sequences of ``rows``: every ``STRIDE`` from an
    offset drawn for the step.
    """
    last = rows - cfg.dspark_block_size
    count = max(1, last // STRIDE)
    key = jax.random.fold_in(jax.random.key(seed), step)
    offset = jax.random.randint(key, (), 1, min(STRIDE, last) + 1)
    return offset + STRIDE * jnp.arange(count, dtype=jnp.int32)
