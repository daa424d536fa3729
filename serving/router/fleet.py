"""The workers that a router knows, and which of their data ranks take requests."""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.router.announcement import Announcement, Role
from serving.routing.score import Target

if TYPE_CHECKING:
    from serving.router.hop import Hop


@dataclass(eq=False)
class Member:
    """A worker. said: its announcement while it belongs to the fleet. available: its last check was
    good and nothing has failed since. checks: so far. failures: in a row without an answer.
    refused: why it may not join, as it was logged. wake: set to have it checked at once.
    """

    url: str
    said: Announcement | None = None
    available: bool = False
    draining: bool = False
    checks: int = 0
    failures: int = 0
    suspect: bool = False
    refused: str | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hops: "set[Hop]" = field(default_factory=set)

    @property
    def targets(self) -> list[Target]:
        """Its data ranks, none unless it has joined."""
        ranks = self.said.data_ranks if self.said else 0
        return [Target(self.url, rank) for rank in range(ranks)]

    @property
    def state(self) -> str:
        """One word for people and metrics."""
        if self.refused is not None:
            return "refused"
        if self.said is None or not self.available:
            return "down"
        return "draining" if self.draining else "up"

    def doubt(self) -> None:
        """A request of it broke off: it gets no more until a check was good."""
        self.available, self.suspect = False, True
        self.wake.set()


class Fleet:
    """Members by URL, in the order in which they were named."""

    def __init__(self, urls: Collection[str]):
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"{urls=} must name at least one worker, and none twice")
        self.members = {url: Member(url) for url in urls}
        # The first to join; what it says of the model holds for as long as the router runs.
        self.pattern: Announcement | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    @property
    def open(self) -> list[Member]:
        """Members that take requests."""
        return [member for member in self if member.state == "up"]

    @property
    def split(self) -> bool:
        """Whether prompts and answers are computed by different workers."""
        roles = {member.said.role for member in self if member.said is not None}
        return {"prefill", "decode"} <= roles

    @property
    def idle(self) -> list[str]:
        """Workers that get nothing, as others compute prompts and answers apart."""
        return [member.url for member in self if self.split and _role(member) == "both"]

    @property
    def ready(self) -> bool:
        """Whether a request could be served."""
        needed: set[Role] = {"prefill", "decode"} if self.split else {"both"}
        return needed <= {member.said.role for member in self.open if member.said}

    def targets(
        self, role: Role, model: str | None = None, without: Collection[Member] = ()
    ) -> list[Target]:
        """Ranks of this role that take requests for a model. A name that no worker serves goes to
        any, which refuses it in its own words.
        """
        able = [m for m in self.open if m.said and m.said.role == role and m not in without]
        serving = [m for m in able if m.said and model in m.said.names]
        known = any(model in m.said.names for m in self if m.said)
        return [target for member in (serving if known else able) for target in member.targets]


def _role(member: Member) -> Role | None:
    return member.said.role if member.said is not None else None
