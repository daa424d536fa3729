"""What an engine is made for: capacities, shapes of its programs, switches."""

from dataclasses import dataclass, replace

from serving.buckets import Bucket
from serving.handoff.options import HandoffOptions
from serving.kv_pool.options import PoolOptions
from serving.speculative import Speculation


@dataclass(frozen=True)
class EngineOptions:
    """Of each data rank: slots, requests that run; pages of its pool; prefill: (requests, rows) of
    prefill dispatches; decode: requests of decode dispatches, the largest must hold every slot.

    max_tokens: prompt and new tokens of one request. replay: bounded replay on both sides; off also
    means that no cached prefix is used. overlap: dispatch a step before the one before it is read.
    logprobs: most alternatives a token. prompt_logprobs: whether requests may ask for them (one
    program more a prefill shape). step_timeout_s: how long a step of a model that is spread over
    devices may take before it counts as stuck. speculation: None for plain decoding. kv_pool: a
    pool of cached pages shared with other engines, None for none; needs replay and prefix cache.
    handoff: how requests are shared with them, None for not at all; needs the pool.
    """

    slots: int = 8
    pages: int = 256
    page_size: int = 64
    max_tokens: int = 4096
    prefill: tuple[tuple[int, int], ...] = ((1, 64), (1, 512))
    decode: tuple[int, ...] = (1, 8)
    replay: bool = True
    prefix_cache: bool = True
    overlap: bool = True
    logprobs: int = 20
    prompt_logprobs: bool = True
    max_stop_ids: int = 8
    max_bias_ids: int = 300
    step_timeout_s: float = 60.0
    speculation: Speculation | None = None
    kv_pool: PoolOptions | None = None
    handoff: HandoffOptions | None = None

    def __post_init__(self) -> None:
        if max(self.decode) < self.slots:
            raise ValueError(f"decode={self.decode} must reach slots={self.slots}")
        if any(rows < 1 or requests < 1 for requests, rows in self.prefill):
            raise ValueError(f"prefill={self.prefill} must be positive")
        if self.kv_pool is not None and not (self.replay and self.prefix_cache):
            raise ValueError("kv_pool must go with replay and prefix_cache")
        if self.handoff is not None and self.kv_pool is None:
            raise ValueError(f"{self.handoff=} must go with kv_pool")

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_tokens // self.page_size)

    def bucket(self, requests: int, rows: int) -> Bucket:
        return Bucket(requests, rows, self.pages_per_request)

    def programs(self, window: int) -> list[tuple[str, Bucket]]:
        """Every program that an engine may need, for every bucket of it."""
        shapes = [self.bucket(*shape) for shape in self.prefill]
        names = ["encode"] if self.replay else ["prefill_full"]
        if self.prompt_logprobs:
            names.append("prefill_scored")
        wanted = [(name, bucket) for name in names for bucket in shapes]
        if self.replay:
            places = sorted({requests for requests, _ in self.prefill})
            wanted += [("replay", self.bucket(count, window)) for count in places]
        wanted += self._decoding()
        moves = "take_state", "put_state", "set_counts"
        wanted += [(name, self.bucket(1, 1)) for name in moves]
        batches = self.kv_pool.batches if self.kv_pool else ()
        pages = [Bucket(1, 1, count) for count in batches]
        wanted += [(name, one) for name in ("take_pages", "put_pages") for one in pages]
        return self.handoff.programs(wanted) if self.handoff else wanted

    def _decoding(self) -> list[tuple[str, Bucket]]:
        """What decode steps need: with speculation, drafts wherever so few requests may decode."""
        ones = [self.bucket(count, 1) for count in sorted(self.decode)]
        if self.speculation is None:
            return [("decode", one) for one in ones]
        wanted = [("verify", one) for one in ones]
        fewer = [0, *(one.requests for one in ones)]
        for one, below in zip(ones, fewer, strict=False):
            if below < self.speculation.max_batch:
                wanted.append(("draft", replace(one, rows=self.speculation.length)))
                wanted.append(("verify", replace(one, rows=1 + self.speculation.length)))
        return wanted
