"""With Engram tables on the host every token is read before the step that takes it is sent."""

import numpy as np
import pytest

from tests.serving.engine.support import ask, drain, prompt


@pytest.fixture
def waiting(engine, monkeypatch):
    """An engine that believes its tables to be on the host; the programs need no rows of it."""
    monkeypatch.setattr(engine.executor.programs, "host", object())
    return engine


def test_tokens_are_read_before_their_rows_are_fetched(waiting, monkeypatch):
    unread, decoded = [], waiting.executor.table_rows.of_newest

    def newest(bucket, places, drafts=None):
        unread.extend(s.dispatched - len(s.result.token_ids) for s in places if s)
        return decoded(bucket, places, drafts)

    monkeypatch.setattr(waiting.executor.table_rows, "of_newest", newest)
    sequences = [waiting.add(ask(prompt(seed, n))) for seed, n in ((1, 70), (2, 5))]
    events = drain(waiting)
    assert len(unread) >= 10 and not any(unread)
    for sequence in sequences:
        told = [event.token.token_id for event in events if event.sequence is sequence]
        assert told == sequence.result.token_ids and len(told) == 6
        known = [*sequence.request.prompt, *sequence.result.token_ids]
        np.testing.assert_array_equal(sequence.tokens_known(), known)
