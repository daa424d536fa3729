"""How often drafted tokens are accepted, by their place in the block."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41_jax.dspark import BLOCK
from serving.engine import Engine
from serving.generate import Loaded
from serving.options import EngineOptions
from serving.quality.statistics import Estimate, ratio
from serving.quality.text import Piece
from serving.request import Request
from serving.speculative import Speculation

SLOTS = 8


@dataclass(frozen=True)
class Acceptance:
    """Of steps with drafts at a temperature: tokens a step; by_position: how often draft i + 1 was
    accepted where all before it were; whole: how often it was, of all steps that verified it.
    """

    temperature: float
    tokens: Estimate
    by_position: tuple[Estimate, ...]
    whole: tuple[Estimate, ...]


class DraftStudy:
    """An engine with drafts that continues the first ``prompt`` tokens of pieces by ``new``
    tokens.
    """

    def __init__(self, loaded: Loaded, pieces: Sequence[Piece], prompt: int, new: int):
        window = loaded.model.cfg.sliding_window
        page = window + window % 2
        total = prompt + new
        options = EngineOptions(
            slots=SLOTS,
            pages=SLOTS * (2 + -(-total // page)),
            page_size=page,
            max_tokens=total,
            prefill=((SLOTS, window),),
            decode=(SLOTS,),
            prefix_cache=False,
            logprobs=0,
            prompt_logprobs=False,
            speculation=Speculation(),
        )
        self.prompts = [tuple(map(int, piece.ids[:prompt])) for piece in pieces]
        self.new = new
        self.engine = Engine(loaded.model, loaded.ops, options)
        self.engine.warm_up()

    def run(self, temperature: float) -> Acceptance:
        engine = self.engine
        requests = [
            Request(prompt, self.new, temperature=temperature, seed=seed)
            for seed, prompt in enumerate(self.prompts)
        ]
        sequences = [engine.add(request) for request in requests]
        tried, reached, accepted = (np.zeros((len(sequences), BLOCK), int) for _ in range(3))
        while not engine.idle:
            before = [(s.result.drafted, s.result.accepted) for s in sequences]
            engine.step()
            for i, (drafted, taken) in enumerate(before):
                drafted, taken = (
                    sequences[i].result.drafted - drafted,
                    sequences[i].result.accepted - taken,
                )
                tried[i, :drafted] += 1
                reached[i, : min(drafted, taken + 1)] += 1
                accepted[i, :taken] += 1
        steps = tried[:, 0]
        return Acceptance(
            temperature,
            ratio(steps + accepted.sum(axis=1), steps),
            tuple(ratio(accepted[:, i], reached[:, i]) for i in range(BLOCK)),
            tuple(ratio(accepted[:, i], tried[:, i]) for i in range(BLOCK)),
        )
