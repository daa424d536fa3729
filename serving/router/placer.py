"""From a prompt to the rank that computes it, and what that rank has to do until its end."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from serving.kv_events.wire import DEVICE, Event, Stored
from serving.router.policy import Offer, Placed, Policy, Prompt
from serving.routing.affinity import Affinity
from serving.routing.score import Target

_SESSIONS = 100_000


class Sessions:
    """Keeps sessions on their ranks, of old ones only the last that were heard of."""

    def __init__(self, most: int = _SESSIONS):
        self._affinity, self._most = Affinity(), most
        self._heard: OrderedDict[str, None] = OrderedDict()

    def choose(self, session: str, targets: Sequence[Target]) -> Target:
        self._heard[session] = None
        self._heard.move_to_end(session)
        if len(self._heard) > self._most:
            self._affinity.end(self._heard.popitem(last=False)[0])
        return self._affinity.choose(session, targets)


class Placer:
    """Books requests with the policy. A prompt counts as computed with the first bytes of an
    answer. If these come with the last ones, when its last whole page is stored, or from the
    beginning if less than a page is not cached.
    """

    def __init__(self, policy: Policy, *, sticky: bool = False):
        self.policy = policy
        self._sessions = Sessions() if sticky else None
        self._keys = itertools.count()
        self._last_pages: dict[tuple[Target, int | None], set[Placed]] = {}

    async def place(
        self, prompt: Prompt, offer: Offer, session: str | None = None, *, tells: bool = True
    ) -> Placed:
        """Book a request on one of the ranks on offer, a session on its own if that is among them;
        NoRank if there is none. tells: the first bytes of the answer come with the first token.
        """
        sessions = self._sessions

        def own() -> Sequence[Target]:
            targets = offer()
            if sessions is None or session is None or not targets:
                return targets
            return [sessions.choose(session, targets)]

        placed = await self.policy.place(next(self._keys), prompt, own)
        if not tells and placed.last_page is None:
            self.policy.prefilled(placed.key)
        elif not tells:
            page = placed.target, placed.last_page
            self._last_pages.setdefault(page, set()).add(placed)
        return placed

    def events(self, target: Target, events: Sequence[Event]) -> None:
        """What a rank tells of its cache."""
        self.policy.events(target, events)
        for event in events:
            if isinstance(event, Stored) and event.medium == DEVICE:
                for page in event.hashes:
                    for placed in self._last_pages.pop((target, page), ()):
                        self.policy.prefilled(placed.key)

    def prefilled(self, placed: Placed) -> None:
        self._unwatch(placed)
        self.policy.prefilled(placed.key)

    def grown(self, placed: Placed, tokens: int) -> None:
        self.policy.grown(placed.key, tokens)

    def freed(self, placed: Placed) -> None:
        self._unwatch(placed)
        self.policy.freed(placed.key)

    def _unwatch(self, placed: Placed) -> None:
        page = placed.target, placed.last_page
        watching = self._last_pages.get(page, set())
        watching.discard(placed)
        if not watching:
            self._last_pages.pop(page, None)
