"""What a worker says of itself to routers, and what they may ask of it beside a body."""

from collections.abc import Mapping
from typing import Any

from serving.engine import Engine
from serving.kv_events.publisher import Publisher
from serving.kv_pool.options import PoolOptions
from serving.server.errors import ApiError
from serving.server.limits import RANK_HEADER, ServerOptions


def announcement(
    engine: Engine, options: ServerOptions, context: int, events: Publisher | None
) -> dict[str, Any]:
    """The answer of ``/worker``. slots and pages are those of a data rank, chunk the prompt rows a
    step; kv_events and kv_replay have an endpoint for each data rank, or none.
    """
    said = engine.options
    return {
        "model": options.names[0],
        "names": list(options.names),
        "fingerprint": options.fingerprint,
        "page_size": said.page_size,
        "data_ranks": len(engine.ranks),
        "role": said.handoff.role if said.handoff is not None else "both",
        "slots": said.slots,
        "pages": said.pages,
        "chunk": max(rows for _, rows in said.prefill),
        "context": context,
        "kv_events": events.endpoints if events is not None else [],
        "kv_replay": events.replay_endpoints if events is not None else [],
        "pool": _pool(said.kv_pool) if said.kv_pool is not None else None,
        "handoff": said.handoff.form if said.handoff is not None else None,
    }


def _pool(options: PoolOptions) -> str:
    """The same for two engines only if they load from one pool; shared memory is a host's."""
    return f"{options.backend}:{options.name or options.address}"


def data_rank(headers: Mapping[str, str], ranks: int) -> int | None:
    """The data rank that a request must go to, None for any; ApiError 400 if there is none such."""
    given = headers.get(RANK_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) < ranks):
        rule = f"{given[:200]!r} must be a data rank, 0 to {ranks - 1}"
        raise ApiError(400, f"{RANK_HEADER}: {rule}", RANK_HEADER)
    return int(given)
