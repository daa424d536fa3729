"""A request that another engine began, on its way from the pool."""

from collections.abc import Callable

import numpy as np

from serving.handoff.options import WINDOWS
from serving.handoff.record import Record
from serving.kv_pool.counts import Counts
from serving.kv_pool.fetch import PoolFetch
from serving.kv_pool.remote import Block


class HandedFetch(PoolFetch):
    """``Fetch`` of all complete pages of a prompt and the record: everything or nothing.

    record: None until it is here. tail: rows of the incomplete page, the first is it; None if there
    is none. why: what is wrong if it is lost.
    """

    def __init__(
        self, first: int, stop: int, length: int, counts: Counts, ended: Callable[[], None]
    ):
        """Pages first .. stop - 1 of a prompt of ``length`` tokens."""
        super().__init__(first, counts, ended)
        self.missing = ()
        self.record: Record | None = None
        self.tail: np.ndarray | None = None
        self.why = "a page was lost, or it took too long"
        self._length, self._complete = length, stop

    @property
    def lost(self) -> bool:
        """Whether something will never come."""
        # First whether it waits: what is still on its way may arrive in between.
        return self.waits is None and (self.record is None or self.stop != self._complete)

    @property
    def hit(self) -> int:
        """Prompt tokens whose global rows are here and stay as they are: all of them, but for a
        pair that is not closed if it has to be replayed.
        """
        return self._length - (0 if self.has_windows else self._length % 2)

    @property
    def has_windows(self) -> bool:
        """Whether nothing of the prompt is left to encode."""
        assert self.record is not None
        return self.record.form == WINDOWS

    def take(self) -> list[Block]:
        tail = [] if self.tail is None else [Block(self._complete, 1, self.tail)]
        return super().take() + tail
