"""A request as the router sees it: what decides where it goes; the rest is the worker's matter."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serving.server.limits import RANK_HEADER

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_RANK = RANK_HEADER.lower().encode()
Headers = list[tuple[bytes, bytes]]
# Of one connection alone (RFC 9110), or made anew on the other.
_NOT_PASSED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length date server expect".split()
) | {_RANK}


def passed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers that go from one side to the other."""
    return [(name, value) for name, value in headers if name.lower() not in _NOT_PASSED]


@dataclass(frozen=True)
class Ask:
    """path: with its query. headers: to be passed on. fields: of the JSON body, none if it is not
    an object; a worker will say so.
    """

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, method: str, path: str, headers: Iterable, body: bytes) -> "Ask":
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = None
        kept = fields if isinstance(fields, dict) else {}
        return cls(method, path, passed(headers), body, kept)

    @property
    def model(self) -> str | None:
        name = self.fields.get("model")
        return name if isinstance(name, str) else None

    def header(self, name: str) -> str | None:
        found = (value for key, value in self.headers if key.lower() == name.lower().encode())
        value = next(found, None)
        return None if value is None else value.decode("latin-1")
