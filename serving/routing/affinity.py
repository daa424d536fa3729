"""Sessions that stay where they began: the baseline of a router."""

from collections.abc import Collection, Hashable

from serving.routing.score import Target


class Affinity:
    """A new session goes to the rank with the fewest, and stays as long as that takes requests."""

    def __init__(self) -> None:
        self._homes: dict[Hashable, Target] = {}
        self._sessions: dict[Target, int] = {}

    def choose(self, session: Hashable, targets: Collection[Target]) -> Target:
        """The session's rank. ``ValueError`` without targets."""
        if not targets:
            raise ValueError(f"{targets=} must not be empty")
        home = self._homes.get(session)
        if home is not None and home in targets:
            return home
        self.end(session)
        home = min(targets, key=lambda target: self._sessions.get(target, 0))
        self._homes[session] = home
        self._sessions[home] = self._sessions.get(home, 0) + 1
        return home

    def end(self, session: Hashable) -> None:
        """The session sends no more."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1
