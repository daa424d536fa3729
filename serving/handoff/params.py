"""``kv_transfer_params`` as vLLM's routers pass them on between two servers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv41_jax.errors import UserError
from serving.handoff.ticket import FIELD, NAME_BYTES, Ticket
from serving.request import Request

_LARGEST = 2**31


@dataclass(frozen=True)
class Transfer:
    """tickets: of a body's choices, in order; None if they are to be handed off instead."""

    tickets: tuple[Ticket, ...] | None = None

    def applied(self, requests: Sequence[Request], *, seeded: bool) -> list[Request]:
        """The requests of a body, to be handed off or gone on with. seeded: their seeds were asked
        for; otherwise a request goes on with those of its beginning. UserError if their number is
        another.
        """
        if self.tickets is None:
            return [
                replace(r, hands_off=True, max_new_tokens=1, min_tokens=min(r.min_tokens, 1))
                for r in requests
            ]
        if len(self.tickets) != len(requests):
            raise UserError(f"{FIELD}: {len(self.tickets)} handoffs for {len(requests)} choices")
        return [
            replace(r, ticket=ticket, seed=r.seed if seeded else ticket.seed)
            for r, ticket in zip(requests, self.tickets, strict=True)
        ]


def transfer_of(params: Mapping[str, Any] | None) -> Transfer | None:
    """What a body asks for, None for neither; UserError that says what is wrong. Fields of others
    are skipped.
    """
    given = params or {}
    away, here = (given.get(f"do_remote_{name}") for name in ("decode", "prefill"))
    for value in (away, here):
        if value not in (None, True, False):
            rule = "do_remote_decode and do_remote_prefill must be true or false"
            raise UserError(f"{FIELD}: {rule}")
    if away and here:
        raise UserError(f"{FIELD}: either do_remote_decode or do_remote_prefill, not both")
    if away:
        return Transfer()
    if not here:
        return None
    handoffs = given.get("handoffs")
    if not isinstance(handoffs, list) or not handoffs:
        raise UserError(f"{FIELD}: do_remote_prefill needs the handoffs of a prefill engine")
    return Transfer(tuple(map(_ticket, handoffs)))


def params_of(tickets: Iterable[Ticket]) -> dict[str, Any]:
    """What a server that goes on with these needs to be given."""
    handoffs = [{"name": t.name.hex(), "bytes": t.size, "seed": t.seed} for t in tickets]
    return {"do_remote_decode": False, "do_remote_prefill": True, "handoffs": handoffs}


def _ticket(given: Any) -> Ticket:
    try:
        name, size, seed = bytes.fromhex(given["name"]), given["bytes"], given["seed"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{FIELD}: {str(given)[:200]} is no hand-off") from None
    whole = type(size) is int and type(seed) is int
    if not (whole and len(name) == NAME_BYTES and 0 < size < _LARGEST and 0 <= seed < 2**32):
        raise UserError(f"{FIELD}: {str(given)[:200]} is no hand-off")
    return Ticket(name, size, seed)
