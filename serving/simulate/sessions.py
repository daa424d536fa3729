"""Who sends what: sessions made up from a workload's numbers, or read from traces."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.bench.workloads import Conversation
from serving.simulate.scenario import Lognormal, Workload

# Ids that no trace uses: answers whose ids are not known.
_UNKNOWN = np.iinfo(np.int32).min


class Session(Protocol):
    """Turns that follow one another. Everything is counted in ids of ``grain`` tokens."""

    @property
    def turns(self) -> int: ...

    @property
    def grows(self) -> bool:
        """Whether every prompt begins with the one before it."""
        ...

    def output(self, turn: int) -> int:
        """Ids that a turn gets."""
        ...

    def prompt(self, turn: int) -> np.ndarray:
        """int32 ids that a turn sends."""
        ...

    def answer(self, turn: int) -> np.ndarray:
        """Those ids, int32."""
        ...

    def delay_s(self, turn: int) -> float:
        """From the last token of the turn before to this one."""
        ...


@dataclass(frozen=True)
class Start:
    """A session's first request. turn > 0: it goes on where it was before the simulation began;
    the caches may hold what it sent last.
    """

    session: Session
    at_s: float
    turn: int = 0


class Source(Protocol):
    """Sessions: some at the start, and who comes when one ends."""

    def starts(self) -> list[Start]: ...

    def next(self) -> Session | None: ...


@dataclass(frozen=True, eq=False)
class Made:
    """A session of the generator: shared ids, then ids of its own, in one line. lengths[i]: of
    turn i's prompt; outputs[i], delays[i].
    """

    shared: range
    base: int
    lengths: np.ndarray
    outputs: np.ndarray
    delays: np.ndarray
    grows: bool = True

    @property
    def turns(self) -> int:
        return len(self.lengths)

    def output(self, turn: int) -> int:
        return int(self.outputs[turn])

    def prompt(self, turn: int) -> np.ndarray:
        own = int(self.lengths[turn]) - len(self.shared)
        shared = np.arange(self.shared.start, self.shared.stop, dtype=np.int32)
        return np.concatenate([shared, np.arange(self.base, self.base + own, dtype=np.int32)])

    def answer(self, turn: int) -> np.ndarray:
        first = self.base + int(self.lengths[turn]) - len(self.shared)
        return np.arange(first, first + int(self.outputs[turn]), dtype=np.int32)

    def delay_s(self, turn: int) -> float:
        return float(self.delays[turn])


class Generator:
    """Sessions of a workload; the n-th is the same whatever happens to the others."""

    def __init__(self, workload: Workload, grain: int, decode_tokens_per_s: float, seed: int):
        """decode_tokens_per_s: 0 where decoding is simulated too."""
        self.workload, self.grain, self.rate = workload, grain, decode_tokens_per_s
        self.seed, self._number = seed, 0
        self._shared = self._ids(workload.shared) if workload.shared else 0
        self._base = workload.groups * self._shared

    def starts(self) -> list[Start]:
        """All sessions. In a steady state long ones are met more often, anywhere in their life."""
        rng = np.random.default_rng((self.seed, 0))
        made = []
        while len(made) < self.workload.sessions:
            session = self.next()
            if not self.workload.steady:
                made.append(Start(session, float(session.delays[0] * rng.random())))
            elif rng.random() * self.workload.turns.most < session.turns:
                made.append(self._in_the_middle(session, rng))
        return made

    def _in_the_middle(self, session: Made, rng: np.random.Generator) -> Start:
        turn = int(rng.integers(session.turns))
        wait = session.delay_s(turn)
        if turn and self.rate:
            wait += float(session.outputs[turn - 1]) * self.grain / self.rate
        return Start(session, wait * rng.random(), turn)

    def next(self) -> Made:
        """The next session, from its first turn."""
        self._number += 1
        work, rng = self.workload, np.random.default_rng((self.seed, self._number))
        turns = max(1, round(_draw(work.turns, 1, rng)[0]))
        inputs = self._ids(_draw(work.turn_input, turns, rng))
        inputs[0] = self._ids(_draw(work.opening, 1, rng)[0])
        outputs = self._ids(_draw(work.output, turns, rng))
        delays = _draw(work.think_s, turns, rng)
        lengths = self._shared + np.cumsum(inputs) + np.concatenate([[0], np.cumsum(outputs)[:-1]])
        fitting = max(1, int(np.searchsorted(lengths + outputs, work.max_context // self.grain)))
        group = int(rng.integers(work.groups))
        base, shared = self._base, group * self._shared
        self._base += int(lengths[-1] + outputs[-1])
        return Made(
            range(shared, shared + self._shared),
            base,
            lengths[:fitting],
            outputs[:fitting],
            delays[:fitting],
        )

    def _ids(self, tokens):
        """Ids of so many tokens, at least one."""
        return np.maximum(1, np.rint(np.asarray(tokens) / self.grain)).astype(np.int64)


def _draw(law: Lognormal, count: int, rng: np.random.Generator) -> np.ndarray:
    return np.minimum(law.median * np.exp(law.sigma * rng.standard_normal(count)), law.most)


class Traced:
    """A conversation of a trace."""

    grows = False

    def __init__(self, conversation: Conversation, number: int):
        self.conversation, self.number = conversation, number

    @property
    def turns(self) -> int:
        return len(self.conversation.turns)

    def output(self, turn: int) -> int:
        return self.conversation.turns[turn].output_tokens

    def prompt(self, turn: int) -> np.ndarray:
        return np.array(self.conversation.turns[turn].prompt, np.int32)

    def answer(self, turn: int) -> np.ndarray:
        """What the next prompt shows of it; a trace says no more."""
        count = self.conversation.turns[turn].output_tokens
        known = np.full(count, _UNKNOWN + self.number, np.int32)
        if turn + 1 < self.turns:
            sent, then = self.prompt(turn), self.prompt(turn + 1)
            if len(then) >= len(sent) and (then[: len(sent)] == sent).all():
                shown = then[len(sent) : len(sent) + count]
                known[: len(shown)] = shown
        return known

    def delay_s(self, turn: int) -> float:
        return self.conversation.turns[turn].delay_s


class Trace:
    """The sessions of a trace at their times; those without one as others end, ``at_once`` of them
    open.
    """

    def __init__(self, conversations: Items[Conversation], at_once: int):
        sessions = [Traced(each, i) for i, each in enumerate(conversations)]
        self._timed = [s for s in sessions if s.conversation.start_s is not None]
        self._others = [s for s in sessions if s.conversation.start_s is None]
        self._at_once, self._taken = at_once, 0

    def starts(self) -> list[Start]:
        timed = [Start(s, s.conversation.start_s or 0.0) for s in self._timed]
        return timed + [
            Start(s, s.delay_s(0)) for s in map(lambda _: self.next(), range(self._at_once)) if s
        ]

    def next(self) -> Traced | None:
        if self._taken == len(self._others):
            return None
        self._taken += 1
        return self._others[self._taken - 1]
