"""What a worker says of itself under ``/worker``."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from dsv41_jax.errors import UserError
from serving.kv_events.sockets import Endpoint

Role = Literal["both", "prefill", "decode"]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]
_ANY_HOST = ("*", "0.0.0.0", "[::]")
# What one fleet has in common: by another one's pages and names requests would go wrong.
_COMMON = ("model", "fingerprint", "page_size")


class Announcement(Struct, frozen=True):
    """model: the first of ``names``. fingerprint: what must agree for pages to be shared. slots and
    pages: of a data rank. chunk: prompt rows a step. context: most tokens of a request. kv_events,
    kv_replay: endpoints, one a data rank, or none. pool: what is behind its caches. handoff: the
    form of what it hands over.
    """

    model: Name
    names: Annotated[list[Name], Meta(min_length=1)]
    fingerprint: str
    page_size: Count
    data_ranks: Count
    role: Role
    slots: Count
    pages: Count
    chunk: Count
    context: Count
    kv_events: list[str]
    kv_replay: list[str]
    pool: str | None = None
    handoff: str | None = None

    def endpoints(self, url: str) -> list[tuple[str, str]]:
        """Addresses of events and replay a data rank; those of any host are at the worker's own.
        UserError for one that is none.
        """
        host = urlsplit(url).hostname or "127.0.0.1"
        pairs = zip(self.kv_events, self.kv_replay, strict=True)
        return [(_reached(events, host), _reached(replay, host)) for events, replay in pairs]

    def difference(self, other: "Announcement") -> str | None:
        """In what it does not belong to the fleet of ``other``; None if it does."""
        split = "both" not in (self.role, other.role)
        for name in (*_COMMON, "handoff") if split else _COMMON:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {mine!r} is not the others' {theirs!r}"
        return None


def announcement(body: bytes, url: str) -> Announcement:
    """The announcement of the worker at ``url``; UserError says what is wrong with it."""
    try:
        said = msgspec.json.decode(body, type=Announcement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"its announcement is malformed: {error}") from None
    counts = len(said.kv_events), len(said.kv_replay)
    if counts not in ((0, 0), (said.data_ranks, said.data_ranks)):
        raise UserError(f"{counts} endpoints of events and replay for {said.data_ranks} data ranks")
    if said.model != said.names[0]:
        raise UserError(f"its model {said.model!r} is not the first of {said.names}")
    said.endpoints(url)
    return said


def _reached(endpoint: str, host: str) -> str:
    parsed = Endpoint.parse(endpoint)
    if parsed.host not in _ANY_HOST:
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{parsed.port}"
