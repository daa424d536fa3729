"""Pages that were put into the pool, told from the storing thread."""

import numpy as np

from serving.kv_events.hashes import page_hashes
from serving.kv_events.hooks import PoolWatch
from serving.kv_events.log import Pooled
from serving.kv_pool.remote import Complete
from tests.serving.kv_pool.support import WAIT_S, eventually
from tests.serving.kv_pool.test_tier import SIZE, SPACE, TOKENS, make, sequence

__all__ = ["make"]  # a fixture


def stored(tier, *indices: int, rank: int) -> None:
    """Pages of a sequence on a data rank go to the pool."""
    done = sequence()
    done.data_rank = rank
    tier._submit(
        [Complete(done, index, 0) for index in indices],
        np.zeros((1, len(indices), SPACE.page_bytes), np.uint8),
    )


def test_what_the_pool_has_taken_is_told_by_the_rank_that_filled_it(make):
    made, told = make(), []
    made.tier.watcher = PoolWatch(lambda rank, change: told.append((rank, change)), SIZE)
    stored(made.tier, 1, 2, 5, rank=1)
    eventually(lambda: len(told) == 3)
    stored(made.tier, 0, rank=0)
    eventually(lambda: len(told) == 4)
    names = page_hashes(TOKENS, SIZE)
    for (rank, change), index in zip(told, (1, 2, 5, 0), strict=True):
        tokens = np.array(TOKENS[index * SIZE : (index + 1) * SIZE], np.int32).tobytes()
        parent = names[index - 1] if index else None
        assert (rank, change) == (int(index > 0), Pooled(names[index], parent, tokens))


def test_what_the_pool_refuses_is_not_told(make):
    made, told = make(), []
    made.tier.watcher = PoolWatch(lambda rank, change: told.append(change), SIZE)
    made.store.put = lambda keys, rows: [False, True]
    stored(made.tier, 0, 1, rank=0)
    made.pool.stores.submit(lambda: None).result(WAIT_S)
    assert [change.name for change in told] == page_hashes(TOKENS, SIZE)[1:2]
