"""Work that ends with the client that waits for it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The result of ``work``, which is cancelled with None as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for left in (task, gone):
            left.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
