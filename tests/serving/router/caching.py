"""A worker that remembers the pages of its prompts and tells of them."""

from typing import Any

import numpy as np
from fastapi import Request
from starlette.responses import Response

from serving.kv_events.hashes import page_hashes
from serving.kv_events.log import EventLog, Evicted, Inserted, Pooled
from serving.kv_events.publisher import Publisher
from serving.kv_events.sockets import Endpoint
from serving.prefix_cache import ROOT
from tests.serving.router.fake import PAGE, FakeWorker, announced


class CachingWorker(FakeWorker):
    """Keeps the whole pages of every prompt on the data rank that it was sent to; ``hits`` are the
    pages of each that were there already. ``close`` it.
    """

    def __init__(self, ranks: int = 2, **changes: Any):
        super().__init__()
        logs = [EventLog(rank, PAGE, pool_pages=100) for rank in range(ranks)]
        self.publisher = Publisher(Endpoint("127.0.0.1", 0), logs)
        endpoints, replays = self.publisher.endpoints, self.publisher.replay_endpoints
        self.said = announced(kv_events=endpoints, kv_replay=replays, data_ranks=ranks, **changes)
        self.nodes: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.hits: list[int] = []
        self._next = ROOT + 1
        self.publisher.start()

    async def _generate(self, request: Request) -> Response:
        answer = await super()._generate(request)
        if self.status == 200:
            seen = self.seen[-1]
            self.hits.append(self.keep(seen.fields["prompt"], int(seen.rank or 0)))
        return answer

    def keep(self, prompt: list[int], rank: int) -> int:
        """Keep the pages of a prompt; how many were there already."""
        nodes, parent, hits = self.nodes[rank], ROOT, 0
        for index, name in enumerate(page_hashes(prompt, PAGE)):
            if name in nodes:
                hits += 1
            else:
                nodes[name], self._next = self._next, self._next + 1
                self.publisher.put(rank, Inserted(nodes[name], parent, _page(prompt, index)))
            parent = nodes[name]
        return hits

    def drop(self, rank: int) -> None:
        """Lose all pages of a rank, the last first."""
        while self.nodes[rank]:
            self.publisher.put(rank, Evicted(self.nodes[rank].popitem()[1]))

    def pool(self, prompt: list[int], rank: int) -> None:
        """Put the pages of a prompt into the pool."""
        parent = None
        for index, name in enumerate(page_hashes(prompt, PAGE)):
            self.publisher.put(rank, Pooled(name, parent, _page(prompt, index)))
            parent = name

    def close(self) -> None:
        self.publisher.close()


def _page(prompt: list[int], index: int) -> bytes:
    return np.asarray(prompt[index * PAGE : (index + 1) * PAGE], np.int32).tobytes()
