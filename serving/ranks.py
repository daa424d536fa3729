"""Data ranks: each has a scheduler with slots, pages and a prefix cache of its own.

What they have in common is decided here: who gets a request, and what the programs of a step, which
all ranks run together, must hold.
"""

from collections.abc import Sequence as Items

from serving.scheduler import Plan, Scheduler
from serving.sequence import Sequence


def assign(ranks: Items[Scheduler], sequence: Sequence) -> None:
    """Queue a new request where the fewest prompt rows are left to encode, its own included: rows
    that a rank has cached are not. A rank with a free slot goes first; among equals the one with
    the fewest requests.
    """
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
    """Requests that wait for a slot move to ranks that have one to spare, the most urgent first."""
    for number, rank in enumerate(ranks):
        while rank.spare_slots > 0:
            crowded = [other for other in ranks if other.waiting and other.spare_slots < 0]
            if not crowded:
                return
            donor = min(crowded, key=lambda other: other.waiting[0].urgency)
            _queue(ranks, donor.waiting.pop(0), number)


def _queue(ranks: Items[Scheduler], sequence: Sequence, number: int) -> None:
    sequence.data_rank = number
    sequence.computed = ranks[number].first_row(sequence)
    ranks[number].add(sequence)
