"""What names the hand-off of a request."""

from dataclasses import dataclass

NAME_BYTES = 16
# Of bodies and answers: where they speak of hand-offs, and the code of an error that is a lost one.
FIELD = "kv_transfer_params"
LOST = "handoff_lost"


@dataclass(frozen=True)
class Ticket:
    """Where the pool has what another engine left of a request. name: ``NAME_BYTES`` random bytes.
    size: bytes of its record. seed: of its random draws.
    """

    name: bytes
    size: int
    seed: int
