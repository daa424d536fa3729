"""Data ranks: each has a scheduler with slots, pages and a prefix cache of its own.

What they have in common is decided here: who gets a request, and what the programs of a step, which
all ranks run together, must hold.
"""

from collections.abc import Sequence as Items

from serving.scheduler import Plan, Scheduler
from serving.sequence import Sequence


def assign(ranks: Items[Scheduler], sequence: Sequence, number: int | None = None) -> None:
    """Queue a new request on rank ``number``, where it stays. Without one, where the fewest prompt
    rows are left to encode, its own included: rows that a rank has cached are not. A rank with a
    free slot goes first; among equals the one with the fewest requests.
    """
    if number is not None:
        sequence.pinned = True
        _queue(ranks, sequence, number)
        return
    first_rows = [rank.first_row(sequence) for rank in ranks]

    def load(number: int) -> tuple[bool, int, int]:
        rank = ranks[number]
        queued = sum(other.length - other.computed for other in rank.sequences)
        own = sequence.length - first_rows[number]
        return rank.spare_slots <= 0, queued + own, len(rank.sequences)

    _queue(ranks, sequence, min(range(len(ranks)), key=load))


def plan_step(ranks: Items[Scheduler]) -> Plan:
    """The next step of all ranks. The largest decoding batch decides whether anything is drafted,
    and one prefill shape holds the chunks of every rank, so that one bucket can serve them all.
    """
    _use_spare_slots(ranks)
    limits = ranks[0].limits
    drafts = limits.drafts_for([rank.ready() for rank in ranks]) if limits.drafts else 0
    step = Plan(drafts=drafts)
    for rank in ranks:
        step.add(rank.plan(drafts, beside=step.prefill))
    return step


def _use_spare_slots(ranks: Items[Scheduler]) -> None:
    """Requests that wait for a slot, if they may move, go to ranks that have one to spare: the most
    urgent first, each where the fewest of its rows are left to encode.
    """
    crowded = [rank for rank in ranks if rank.spare_slots < 0]
    free = [s for rank in crowded for s in rank.waiting if not s.pinned]
    for sequence in sorted(free, key=lambda s: s.urgency):
        spare = [number for number, rank in enumerate(ranks) if rank.spare_slots > 0]
        if not spare:
            return
        number = max(spare, key=lambda number: ranks[number].first_row(sequence))
        own = ranks[sequence.data_rank]
        if own.spare_slots < 0 and not _stays(sequence, own, ranks[number]):
            own.waiting.remove(sequence)
            _queue(ranks, sequence, number)


def _stays(sequence: Sequence, own: Scheduler, other: Scheduler) -> bool:
    """Whether a slot gets free on the rank that has a request's prefix before another rank could
    have encoded that again. What a pool was asked for, another rank can load as well.
    """
    again = own.first_row(sequence) - other.first_row(sequence)
    if again <= 0 or sequence.fetch is not None:
        return False
    rows = max(rows for _, rows in own.limits.prefill)
    steps = sorted(
        -(-(s.length - s.computed) // rows) + s.request.max_new_tokens - s.dispatched
        for s in own.running
    )
    before = own.waiting.index(sequence) + len(own.swapped)
    turn = before - (own.limits.slots - len(own.running))
    return turn < 0 or (turn < len(steps) and steps[turn] <= -(-again // rows))


def _queue(ranks: Items[Scheduler], sequence: Sequence, number: int) -> None:
    sequence.data_rank = number
    sequence.computed = ranks[number].first_row(sequence)
    ranks[number].add(sequence)
