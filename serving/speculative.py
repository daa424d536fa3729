"""Speculative decoding as the host sees it: options, and what became of the drafts."""

import argparse
from dataclasses import dataclass, field

from dsv41_jax.dspark import BLOCK
from dsv41_jax.errors import UserError

SIMULATED = "simulated_acceptance"
_MAX_BATCH = 32


@dataclass(frozen=True)
class Speculation:
    """DSpark with ``length`` drafts a step. max_batch: requests of a decode step beyond which
    nothing is drafted. simulated: for benchmarks, tokens a step on average instead of those that
    the model confirms; the text means nothing then. budget: drafts that a step verifies in all (of
    a data rank), the likeliest by the draft's own confidence and at least one of each request; None
    for all of them. UserError for values out of range.
    """

    length: int = BLOCK
    max_batch: int = _MAX_BATCH
    simulated: float | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.length <= BLOCK:
            raise UserError(f"draft length {self.length} must be between 1 and {BLOCK}")
        if self.max_batch < 1:
            raise UserError(f"largest batch with drafts {self.max_batch} must be at least 1")
        if self.budget is not None and self.budget < 1:
            raise UserError(f"draft budget {self.budget} must be at least 1")
        if self.simulated is not None and not 1 <= self.simulated <= 1 + self.length:
            rule = f"must be between 1 and {1 + self.length}"
            raise UserError(f"simulated acceptance {self.simulated} {rule}")

    @property
    def marks(self) -> dict[str, float]:
        """What every output has to say of a simulation."""
        return {} if self.simulated is None else {SIMULATED: self.simulated}


@dataclass
class Acceptance:
    """Totals. steps: verifications of a request that had drafts. by_position[i]: how often draft
    i + 1 of a block was accepted, tried[i]: how often it was verified.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * BLOCK)
    tried: list[int] = field(default_factory=lambda: [0] * BLOCK)

    def add(self, drafted: int, accepted: int) -> None:
        """One request's step; without drafts it is none."""
        if drafted:
            self.steps += 1
            self.drafted += drafted
            self.accepted += accepted
            for position in range(accepted):
                self.by_position[position] += 1
            for position in range(drafted):
                self.tried[position] += 1

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts and the token after them; 1 before the first step."""
        return 1 + self.accepted / max(self.steps, 1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that generates."""
    parser.add_argument("--speculative", choices=("dspark",), help="default: plain decoding")
    parser.add_argument(
        "--draft-length", type=int, default=BLOCK, metavar="N", help=f"1 to {BLOCK} (default)"
    )
    parser.add_argument(
        "--speculative-max-batch",
        type=int,
        default=_MAX_BATCH,
        metavar="N",
        help="no drafts in larger decode steps",
    )
    parser.add_argument(
        "--draft-budget",
        type=int,
        metavar="N",
        help="verify N drafts a step, the likeliest (default: all)",
    )
    parser.add_argument(
        "--simulated-acceptance",
        type=float,
        metavar="X",
        help="benchmarks only: X tokens a step whatever the model says; the text means nothing",
    )


def speculation_of(arguments: argparse.Namespace) -> Speculation | None:
    """What the options ask for; UserError for values out of range."""
    made = Speculation(
        arguments.draft_length,
        arguments.speculative_max_batch,
        arguments.simulated_acceptance,
        arguments.draft_budget,
    )
    if arguments.speculative is None and made != Speculation():
        raise UserError("options of speculation need --speculative dspark")
    return None if arguments.speculative is None else made
