"""A request on its way through the engine, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.grammar import Matcher
from serving.handoff.ticket import Ticket
from serving.output import TextOutput
from serving.request import Request, Result

if TYPE_CHECKING:
    from serving.handoff.fetch import HandedFetch
    from serving.kv_pool.keys import Chain
    from serving.kv_pool.remote import Fetch


class Stage(Enum):
    """WAITING: no slot yet. PREFILL: rows of its prompt are left. REPLAY: all are encoded. DECODE:
    has a first token, or one on its way.

    SWAPPED: preempted, its state is on the host. LEAVING: finished here, on its way to another
    engine. DONE: finished, aborted or refused.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    LEAVING = "leaving"
    DONE = "done"


@dataclass
class Saved:
    """What a preempted sequence held; ``state`` is filled by the engine with the bytes."""

    slot: int
    pages: list[int]
    state: object = None


@dataclass(eq=False)
class Sequence:
    """Everything the host knows of a request.

    data_rank: whose slots and pages it uses; pinned: it may not wait elsewhere. computed: prompt
    rows whose global entries are written or on their way, or that a waiting request expects to
    find. hit: cached prompt tokens adopted. dispatched: tokens sampled so far, read or not; of a
    step with drafts that was not read, only the one that is certain, and ``ahead`` counts the
    others. nodes: prefix-cache nodes of its first pages. matcher: where it stands in its grammar,
    by the tokens read. resume_to: stage before it was preempted; saved: the state taken from the
    device then. fetch: what a pool is asked for it, refetched: a second time; stored: its first
    pages that the pool has or will have; chain: their keys. handed: what another engine left of it,
    until its slot has it; left: where another engine finds it.
    """

    request: Request
    arrival: int
    priority: int = 0
    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    stage: Stage = Stage.WAITING
    result: Result = field(default_factory=Result)
    data_rank: int = 0
    pinned: bool = False
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    computed: int = 0
    hit: int = 0
    dispatched: int = 0
    ahead: int = 0
    resume_to: Stage = Stage.PREFILL
    saved: Any = None
    fetch: "Fetch | None" = None
    refetched: bool = False
    stored: int = 0
    chain: "Chain | None" = None
    handed: "HandedFetch | None" = None
    left: Ticket | None = None
    output: TextOutput | None = None
    matcher: Matcher | None = None
    queued_at: float = 0.0
    first_token_at: float = 0.0

    @classmethod
    def of(cls, request: Request, arrival: int, priority: int = 0) -> "Sequence":
        made = cls(request, arrival, priority, np.asarray(request.prompt, np.int32))
        if request.grammar is not None:
            made.matcher = request.grammar.start()
        return made

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: lower numbers of ``priority`` first, then arrival."""
        return self.priority, self.arrival

    @property
    def length(self) -> int:
        return len(self.prompt)

    def newest(self, count: int) -> np.ndarray:
        """The last ``count`` ids that have been read, int32; fewer if there are no more."""
        made = self.result.token_ids[-count:]
        first = max(self.length - (count - len(made)), 0)
        return np.concatenate([self.prompt[first:], np.asarray(made, np.int32)])

    def prompt_pages(self, page_size: int) -> int:
        """Whole pages of the prompt that a hit may cover: its last token is always computed, but
        for a request that another engine began.
        """
        return (self.length - (self.request.ticket is None)) // page_size

    @property
    def next_position(self) -> int:
        """Position of the token that the next decode step feeds, the lowest if drafts are on their
        way.
        """
        return self.length + self.dispatched - 1

    @property
    def all_dispatched(self) -> bool:
        """Whether the last token that ``max_new_tokens`` allows is on its way."""
        return self.dispatched >= self.request.max_new_tokens

    @property
    def awaits_reader(self) -> bool:
        """Whether the next token depends on one that has not been read."""
        return self.matcher is not None and self.dispatched > len(self.result.token_ids)

    def drafts(self, most: int) -> int:
        """Drafts that it takes in a step that makes ``most``; a grammar is followed by the host, so
        its request takes none.
        """
        return most if self.request.speculative and self.matcher is None else 0

    def rows_after(self, drafts: int) -> int:
        """Rows that are written at most once a step with its ``drafts`` is done."""
        most = self.next_position + self.ahead + 1 + drafts
        return min(most, self.length + self.request.max_new_tokens - 1)

    def dispatch(self, drafts: int) -> None:
        """A step with its ``drafts`` is on its way."""
        self.dispatched += 1
        self.ahead += drafts

    def settle(self, drafts: int, tokens: int) -> None:
        """That step was read: it gave so many ``tokens``."""
        self.dispatched += tokens - 1
        self.ahead -= drafts

    def tokens_known(self) -> np.ndarray:
        """Prompt and generated ids that have been read, int32."""
        return np.concatenate([self.prompt, np.asarray(self.result.token_ids, np.int32)])
