"""When what another engine left counts as lost."""

from typing import Any

import numpy as np

from serving.handoff.fetch import HandedFetch
from serving.kv_pool.counts import Counts
from serving.kv_pool.remote import Waits


class _Overtaken(HandedFetch):
    """All of it arrives just before somebody asks whether it is awaited."""

    @property
    def waits(self) -> Waits | None:
        if self.record is None:
            record: Any = object()
            self.record = record
            self.arrived(np.zeros((2, 1), np.uint8), 2)
            self.finish()
        return super().waits


def test_what_arrives_in_the_middle_of_the_question_is_not_lost():
    fetch = _Overtaken(1, 3, 12, Counts(), lambda: None)
    fetch.turn(Waits.LOOKUP, 60.0)
    assert not fetch.lost and fetch.stop == 3


def test_what_ends_without_its_pages_is_lost():
    fetch = HandedFetch(1, 3, 12, Counts(), lambda: None)
    fetch.turn(Waits.LOOKUP, 60.0)
    assert not fetch.lost
    fetch.arrived(np.zeros((1, 1), np.uint8), 1)
    fetch.finish()
    assert fetch.lost
