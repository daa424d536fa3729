"""Late binding: requests wait in the router until a rank has room for them in its next step.

A request that is bound to a rank on arrival waits behind whatever that rank turns out to be busy
with, while another gets free. Here it waits unbound as long as the next step of every rank is full,
and the first that has room gets it.

Ranks of a worker step together: what arrives during a step begins with the next one, whichever rank
it is for, and that is as long as its longest prompt times the most prompts of a rank, padding
included. So prompts of one length belong together. The router does not see steps, but a first token
is the end of one: what was sent to a worker before it has begun, what is sent after it queues.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, log2

from serving.routing.score import Board, Overlap, Target

# Until a request goes, what it saw of the ranks is good for so long.
_KNOWN_S = 0.05
_RUNNING = 0.3


@dataclass(frozen=True)
class Patience:
    """step: prompt rows of a rank's largest dispatch, the threshold: a rank whose next step is as
    full takes no more, unless its part of all that waits in the router, times ``share``, is larger;
    one request is always taken. wait_s: a request is overtaken only by those that came at most so
    much later, and waits at most so long for a rank that has its prefix. priority_s: seconds of
    waiting that a level of priority is worth. window: how many requests are looked through for one
    that fits, and how many of those that do not are passed over.
    """

    step: int = 8192
    share: float = 1.0
    wait_s: float = 0.2
    priority_s: float = 10.0
    window: int = 32

    def __post_init__(self) -> None:
        for name in ("step", "share", "wait_s", "priority_s"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise ValueError(f"{name}={value} must be finite and at least 0")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")


@dataclass(eq=False)
class Waiting:
    """A request in the router. look: what the ranks it may go to have of its prompt now. since:
    when it came; due: the same, moved by its priority. overlaps: what it saw when it looked last;
    work: rows it needs where it needs fewest.
    """

    key: Hashable
    prompt: int
    look: Callable[[], Mapping[Target, Overlap]]
    since: float
    due: float
    overlaps: Mapping[Target, Overlap] = field(default_factory=dict)
    looked: float = -inf
    work: float = 0.0


@dataclass(frozen=True)
class _Sent:
    """rows: to compute; cost: the same and what the pool's tokens cost."""

    target: Target
    rows: int
    cost: float


class _Next:
    """What a worker's next step holds."""

    def __init__(self, sent: Collection[_Sent]):
        self.requests = len(sent)
        self.longest = max((each.rows for each in sent), default=0)
        self.counts = Counter(each.target for each in sent)
        self.costs = Counter[Target]()
        for each in sent:
            self.costs[each.target] += each.cost
        self.size = self.longest * max(self.counts.values(), default=0)

    def with_one(self, target: Target, rows: int) -> int:
        """Rows of a rank in it, padding included, with one request more."""
        most = max(self.counts[target] + 1, *self.counts.values(), 0)
        return most * max(self.longest, rows)


@dataclass(frozen=True)
class Placed:
    """A request that goes to a rank now; it is booked there."""

    key: Hashable
    target: Target
    overlap: Overlap


class Queue:
    """Requests that wait, and what of those sent has not begun.

    After every change (``add``, ``prefilled``, ``freed``, ``join``, ``leave``) and at ``wake_at``,
    ``place`` says who goes where. Times are seconds of any one clock.
    """

    def __init__(self, board: Board, patience: Patience | None = None):
        """board: what is booked; nobody else books on it."""
        self.board, self.patience = board, patience or Patience()
        self.wake_at = inf
        self._waiting: list[Waiting] = []
        self._keys: dict[Hashable, Waiting] = {}
        self._sent: dict[Hashable, Target] = {}
        self._queued: dict[str, dict[Hashable, _Sent]] = {}
        self._running: dict[str, dict[Hashable, _Sent]] = {}
        self._began: dict[str, float] = {}
        self._most = 0.0
        # Of all that wait, in whole rows, so that it does not drift.
        self._work = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        key: Hashable,
        prompt: int,
        look: Callable[[], Mapping[Target, Overlap]],
        now: float,
        priority: int = 0,
    ) -> None:
        """A request of ``prompt`` tokens waits from now on. look: the ranks it may go to and what
        they have of it, asked now and again when it goes. Lower numbers of ``priority`` go first.
        ``ValueError`` if its key waits or was sent.
        """
        if key in self._sent or key in self._keys:
            raise ValueError(f"{key=} must be new")
        due = now + priority * self.patience.priority_s
        self._keys[key] = request = Waiting(key, prompt, look, now, due)
        self._look(request, now)
        insort(self._waiting, request, key=lambda each: each.due)

    def place(self, now: float) -> list[Placed]:
        """Who goes where now, in order, booked; sets ``wake_at``, infinite if nobody waits for a
        time.
        """
        placed: list[Placed] = []
        self.wake_at = inf
        loads, held = self.board.loads, set[Waiting]()
        stepping = {rank.worker for rank, load in loads.items() if load.prefill > 0.5}
        if not self._waiting:
            return placed
        steps = {rank.worker: self._next(rank.worker) for rank in loads}
        while len(held) < self.patience.window and self._any_room(steps):
            first = next((each for each in self._waiting if each not in held), None)
            if first is None:
                break
            self._look(first, now, _KNOWN_S)
            target = self._best(first, steps, stepping)
            if target is None or self._better_elsewhere(first, target, steps, now):
                held.add(first)
                continue
            request = self._like(first, target, steps[target.worker], held)
            self._look(request, now)
            if target not in request.overlaps:
                continue
            placed.append(self._send(request, target))
            steps[target.worker] = self._next(target.worker)
        for worker in {each.target.worker for each in placed} - stepping:
            self._begins(worker, now)
        return placed

    def prefilled(self, key: Hashable, now: float) -> None:
        """A request's first token is there, so a step of its worker has ended."""
        self.board.prefilled(key)
        if target := self._sent.get(key):
            self._running[target.worker].pop(key, None)
            self._begins(target.worker, now)

    def freed(self, key: Hashable) -> None:
        """A request has ended, however, or nobody waits for it any more."""
        if request := self._keys.pop(key, None):
            self._waiting.remove(request)
            self._work -= request.work
        if target := self._sent.pop(key, None):
            self._queued[target.worker].pop(key, None)
            self._running[target.worker].pop(key, None)
            self.board.freed(key)

    def leave(self, targets: set[Target]) -> list[Hashable]:
        """Ranks take no more; the requests that had been sent to them, to be added again or given
        up.
        """
        self.board.leave(targets)
        lost = [key for key, target in self._sent.items() if target in targets]
        for key in lost:
            self.freed(key)
        return lost

    def _begins(self, worker: str, now: float) -> None:
        """A worker's next step takes what was sent to it."""
        running = self._running[worker]
        for key, each in running.items():
            running[key] = replace(each, rows=max(each.rows - self.patience.step, 0))
        running.update(self._queued[worker])
        self._queued[worker].clear()
        self._began[worker] = now

    def _look(self, request: Waiting, now: float, good_s: float = 0.0) -> None:
        """Look again if it looked longer than ``good_s`` ago."""
        if now - request.looked <= good_s:
            return
        request.overlaps, request.looked = request.look(), now
        rows = [self._rows(request, rank) for rank in request.overlaps]
        self._work -= request.work
        request.work = min(rows, default=request.prompt)
        self._work += request.work

    def _rows(self, request: Waiting, rank: Target) -> int:
        """Prompt rows that a rank would have to compute."""
        overlap = request.overlaps[rank]
        return max(request.prompt - max(overlap.cached, overlap.pooled), 0)

    def _cost(self, request: Waiting, rank: Target) -> float:
        """The same, and as many as what comes from the pool costs."""
        credit = request.overlaps[rank].credit(self.board.weights.pool_credit)
        return max(request.prompt - credit, 0.0)

    def _next(self, worker: str) -> _Next:
        """What was sent for it, and of the prompts in the step under way those that are longer."""
        step, queued = self.patience.step, self._queued.get(worker, {})
        left = [
            replace(each, rows=min(each.rows - step, step), cost=0.0)
            for each in self._running.get(worker, {}).values()
            if each.rows > step
        ]
        return _Next([*queued.values(), *left])

    def _any_room(self, steps: Mapping[str, _Next]) -> bool:
        """Whether any rank has room for the shortest prompt; sets what a rank's next step may
        hold.
        """
        patience, ranks = self.patience, self.board.loads
        share = patience.share * self._work / max(len(ranks), 1)
        self._most = max(patience.step, share)
        return any(self._fits(0, rank, steps[rank.worker]) for rank in ranks)

    def _has_room(self, request: Waiting, rank: Target, step: _Next) -> bool:
        return self._fits(self._rows(request, rank), rank, step)

    def _fits(self, rows: int, rank: Target, step: _Next) -> bool:
        """Whether a rank's next step has room for so many rows, or nothing for the rank."""
        return not step.counts[rank] or step.with_one(rank, rows) <= self._most

    def _best(
        self, request: Waiting, steps: Mapping[str, _Next], stepping: set[str]
    ) -> Target | None:
        """The rank with room where a request and those it delays lose least: with half a step until
        it begins where one is under way, and half a step for one more, which is lost to others if
        the workers are busy. A step is taken to be half full. Among equals the rank whose worker's
        step began first. None if none has room or it may go to none.
        """
        best, least = None, (inf, inf)
        half = self.board.weights.prefill * self.patience.step / 4
        busy = len(stepping) / max(len(steps), 1)
        for rank in request.overlaps:
            step = steps.get(rank.worker)
            if rank not in self.board.loads or step is None:
                continue
            if not self._has_room(request, rank, step):
                continue
            loss = self._loss(request, rank, step) + half * (rank.worker in stepping)
            loss += half * busy * (not step.requests)
            order = loss, self._began.get(rank.worker, 0.0)
            if best is None or order < least:
                best, least = rank, order
        return best

    def _loss(self, request: Waiting, rank: Target, step: _Next) -> float:
        """In rows, which are time: the step that the request would be in, what that is longer for
        the others in it, and what the pool's tokens cost. What runs on the rank mostly ends with
        the step before, so that it counts in part.
        """
        board = self.board
        rows, cost = self._rows(request, rank), self._cost(request, rank)
        size = step.with_one(rank, rows)
        loss = size + (size - step.size) * step.requests + cost - rows
        loss += _RUNNING * (board.loads[rank].prefill - step.costs[rank])
        weights = board.weights
        return weights.prefill * loss + weights.decode * (board.loads[rank].active + request.prompt)

    def _better_elsewhere(
        self, request: Waiting, target: Target, steps: Mapping[str, _Next], now: float
    ) -> bool:
        """Whether a request should wait for a rank without room that has its prefix. Waiting costs
        all that is booked there and no less than one and a half steps, which must be less than what
        the prefix saves. It does so for ``wait_s``.
        """
        until = request.since + self.patience.wait_s
        here, least = self._cost(request, target), 0.75 * self.patience.step
        if now >= until or here <= least:
            return False
        for rank in request.overlaps:
            load = self.board.loads.get(rank)
            if load is None or max(load.prefill, least) + self._cost(request, rank) >= here:
                continue
            if not self._has_room(request, rank, steps[rank.worker]):
                self.wake_at = min(self.wake_at, until)
                return True
        return False

    def _like(self, first: Waiting, target: Target, step: _Next, held: set[Waiting]) -> Waiting:
        """Who goes to the rank that was found for ``first``: of those whom it lets overtake and who
        have to compute no more there than elsewhere, the one whose work is most like what the step
        holds already.
        """
        if not step.longest:
            return first
        found, least = first, inf
        for request in self._waiting[: self.patience.window]:
            overtakes = request.due <= first.due + self.patience.wait_s
            if not overtakes or request in held or target not in request.overlaps:
                continue
            rows = self._rows(request, target)
            distance = abs(log2(max(rows, 1) / step.longest))
            fits = rows <= request.work and self._has_room(request, target, step)
            if distance < least and fits:
                found, least = request, distance
        return found

    def _send(self, request: Waiting, target: Target) -> Placed:
        overlap = request.overlaps[target]
        self._waiting.remove(request)
        self._work -= request.work
        del self._keys[request.key]
        sent = _Sent(target, self._rows(request, target), self._cost(request, target))
        self._running.setdefault(target.worker, {})
        self._queued.setdefault(target.worker, {})[request.key] = sent
        self.board.book(request.key, target, request.prompt, overlap)
        self._sent[request.key] = target
        return Placed(request.key, target, overlap)
