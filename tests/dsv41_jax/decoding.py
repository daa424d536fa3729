"""Prefill, decode steps with given tokens, drafts after each: the form of the e2e goldens."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.conftest import GOLDENS
from tests.dsv41_jax.support import rows_for, tiny

STEPS = 12


@dataclass(frozen=True)
class Run:
    """prefill [T, V], decode [12, V], drafted [12, 5], confidence [12, 5]; draft_logits [5, V] are
    those of the first step.
    """

    prefill: np.ndarray
    decode: np.ndarray
    drafted: np.ndarray
    confidence: np.ndarray
    draft_logits: np.ndarray


@cache
def run(numerics: str, file: str, prompt: str) -> Run:
    model = tiny(numerics)
    with np.load(GOLDENS / file) as golden:
        ids, tokens = (golden[f"{prompt}.{name}"] for name in ("input_ids", "decode_tokens"))
    done = model.forward(rows_for(ids), model.cache())
    prefill = np.asarray(done.logits[0, : len(ids)])
    fed, decode, drafts = ids.tolist(), [], []
    for step in range(STEPS):
        rows = rows_for([int(tokens[step])], len(fed), before=fed)
        done = model.forward(rows, done.cache)
        fed.append(int(tokens[step]))
        decode.append(np.asarray(done.logits[0, 0]))
        # The golden draft opens with the golden's next token, whatever this model preferred.
        drafts.append(model.draft(int(tokens[step + 1]), len(fed), done.cache))
    return Run(
        prefill,
        np.stack(decode),
        np.stack([np.asarray(draft.ids[0]) for draft in drafts]),
        np.stack([np.asarray(draft.confidence[0]) for draft in drafts]),
        np.asarray(drafts[0].logits[0]),
    )


def kept(golden: dict[str, np.ndarray], prompt: str, prefill: np.ndarray) -> np.ndarray:
    """The rows of prefill logits that the file holds."""
    return prefill[golden.get(f"{prompt}.prefill_positions", np.arange(len(prefill)))]
