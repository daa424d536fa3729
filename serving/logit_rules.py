"""What a request does to its logits before sampling: penalties, bias, minimum length, grammar."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

PROMPT, GENERATED = 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRules:
    """Per request, [B] or [B, n]. repetition 1, frequency 0, presence 0, bias 0 and min_position 0
    change nothing.

    bias_ids int32, -1 for none, bias f32: added to those ids. stop_ids int32, -1 for none:
    impossible before min_position, the position of the first token that may end the request.
    allowed int32 [B, ceil(V / 32)]: all ids but those whose bit is set are impossible; None: every
    id is possible.
    """

    repetition: Array
    frequency: Array
    presence: Array
    bias_ids: Array
    bias: Array
    stop_ids: Array
    min_position: Array
    allowed: Array | None = None


def changes(rules: LogitRules, position: Array) -> Array:
    """bool [B]: whether ``adjusted`` may change something of a row."""
    found = (rules.repetition != 1) | (rules.frequency != 0) | (rules.presence != 0)
    found |= jnp.any(rules.bias_ids >= 0, axis=1)
    found |= (position < rules.min_position) & jnp.any(rules.stop_ids >= 0, axis=1)
    return found if rules.allowed is None else found | jnp.any(rules.allowed != -1, axis=1)


def adjusted(logits: Array, rules: LogitRules, counts: Array, position: Array) -> Array:
    """float32 logits [B, V] after the rules. counts int32 [B, V]: GENERATED times the occurrences
    in the output, plus PROMPT if the id occurs in the prompt. position int32 [B]: of the token to
    be sampled.
    """
    seen, generated = counts > 0, counts // GENERATED
    repetition = rules.repetition[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    logits = logits - rules.frequency[:, None] * generated
    logits = logits - rules.presence[:, None] * (generated > 0)
    logits = _at(logits, rules.bias_ids).add(rules.bias, mode="drop")
    early = (position < rules.min_position)[:, None]
    logits = _at(logits, jnp.where(early, rules.stop_ids, -1)).set(-jnp.inf, mode="drop")
    if rules.allowed is None:
        return logits
    return jnp.where(_bits(rules.allowed, logits.shape[1]), logits, -jnp.inf)


def _bits(words: Array, count: int) -> Array:
    """The first ``count`` bits of int32 [B, W] as bool [B, count], the lowest of a word first."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] != 0


def counted(counts: Array, slot: Array, token: Array, live: Array) -> Array:
    """counts int32 [slots, V] with one more occurrence of token int32 [B] in each live request's
    output.
    """
    slot = jnp.where(live, slot, counts.shape[0])
    return counts.at[slot, token].add(GENERATED, mode="drop")


def _at(logits: Array, ids: Array):
    """Indexed update at ids [B, n] of each row; negative ids fall outside and are dropped."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, jnp.where(ids < 0, logits.shape[1], ids)]
