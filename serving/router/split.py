"""The two bodies of a request whose prompt and answer are computed by different workers."""

from typing import Any

import msgspec

from serving.handoff.ticket import FIELD
from serving.router.ask import Ask
from serving.router.hop import Hop


def prefill_body(ask: Ask) -> bytes:
    """For the worker that computes the prompt and the first token."""
    fields = {**ask.fields, "max_tokens": 1, "stream": False}
    fields[FIELD] = {"do_remote_decode": True}
    fields.pop("stream_options", None)
    if fields.get("max_completion_tokens") is not None:
        fields["max_completion_tokens"] = 1
    least = fields.get("min_tokens")
    if isinstance(least, int) and least > 1:
        fields["min_tokens"] = 1
    return msgspec.json.encode(fields)


def handed_over(hop: Hop) -> dict[str, Any] | None:
    """What the first worker's answer has for the second one; None if that is nothing."""
    try:
        found = msgspec.json.decode(hop.whole or b"")[FIELD]
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def decode_body(ask: Ask, parameters: dict[str, Any]) -> bytes:
    """For the worker that goes on from the first token."""
    return msgspec.json.encode({**ask.fields, FIELD: parameters})
