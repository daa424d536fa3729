"""The events of all data ranks of the fleet, brought onto the event loop."""

import asyncio
from collections.abc import Callable
from functools import partial

from serving.kv_events.subscriber import Subscriber
from serving.kv_events.wire import Event
from serving.router.fleet import Member
from serving.routing.score import Target

Deliver = Callable[[Target, list[Event]], None]


class Feed:
    """Follows members from ``start`` to ``stop``; nothing is delivered outside."""

    def __init__(self, deliver: Deliver):
        self._deliver = deliver
        self._followed: dict[Target, Subscriber] = {}

    def start(self, member: Member) -> None:
        """Follow all ranks of a worker that publish; the first events are those of a replay."""
        assert member.said is not None
        loop = asyncio.get_running_loop()
        endpoints = member.said.endpoints(member.url)
        # A worker without events has no endpoints.
        for target, (events, replay) in zip(member.targets, endpoints, strict=False):
            take = partial(loop.call_soon_threadsafe, self._take, target)
            made = Subscriber(
                events, replay, take, page_size=member.said.page_size, rank=target.rank
            )
            self._followed[target] = made
            made.start()

    async def stop(self, member: Member) -> None:
        """Follow a worker no more."""
        for target in member.targets:
            if subscriber := self._followed.pop(target, None):
                await asyncio.to_thread(subscriber.close)

    def _take(self, target: Target, events: list[Event]) -> None:
        if target in self._followed:
            self._deliver(target, events)
