"""What is measured: batches of requests, and the dispatches that the engine makes of them.

A case is NAME=GROUP,GROUP,... and a group [N*]Q[@K][c][:D]: N requests of Q query tokens that reach
position K, the query included (K = Q if it is not given). Q of 1 is decoding; :D makes a group a
verification of D drafts, with Q = 1 + D; other groups are prompts, whose K - Q tokens before the
query are a prefix hit or, with c, earlier chunks of the same prompt. Examples: decode=32*1@8192,
verify=16*6@4096:5, prefill=8192, hit=2048@10240, mix=8192,32*1@8192.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dsv41_jax.cache import CacheShape
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.buckets import Bucket
from serving.replay import adopted_hit, prefill_start

PAGE = 64
ROOM = 512  # tokens by which verification may make a request longer
PHASES = ("decode", "verify", "draft", "prefill", "replay")
_GROUP = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c?)(?::(\d+))?")


@dataclass(frozen=True)
class Group:
    """count requests of ``rows`` query tokens, ``tokens`` in all afterwards."""

    count: int
    rows: int
    tokens: int
    drafts: int = 0
    chunked: bool = False

    @property
    def phase(self) -> str:
        if self.drafts:
            return "verify"
        return "decode" if self.rows == 1 and self.tokens > 1 and not self.chunked else "prefill"

    def __str__(self) -> str:
        at = f"@{self.tokens}" if self.tokens != self.rows else ""
        drafts = f":{self.drafts}" if self.drafts else ""
        return f"{self.count}*{self.rows}{at}{'c' * self.chunked}{drafts}"


@dataclass(frozen=True)
class Case:
    """phase: of ``PHASES``, or "mixed". replay: of its prompts. captured: in command buffers."""

    name: str
    phase: str
    groups: tuple[Group, ...]
    replay: bool = True
    captured: bool = True

    @property
    def requests(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def key(self) -> str:
        """Names the case among those of a run, so that a later run can skip it."""
        groups = ",".join(map(str, self.groups))
        if all(group.phase != "prefill" for group in self.groups):
            return f"{self.name} {groups}"
        buffers = "" if self.captured else ", no command buffers"
        return f"{self.name} {groups} replay {'on' if self.replay else 'off'}{buffers}"


@dataclass(frozen=True)
class Place:
    """Where a request is: its slot, its pages, its tokens before and after a dispatch."""

    slot: int
    pages: tuple[int, ...]
    start: int
    stop: int
    hit: int = 0


@dataclass(frozen=True)
class Dispatch:
    """One call of a program for requests that all have the same shape."""

    program: str
    bucket: Bucket
    places: tuple[Place, ...]
    length: int  # prompt tokens of a request


def parse_case(text: str) -> Case:
    """A --case; UserError for what the grammar does not have."""
    name, _, groups = text.partition("=")
    if not name or not groups:
        raise UserError(f"--case {text}: must be NAME=GROUP,GROUP,...")
    found = tuple(_group(text, part) for part in groups.split(","))
    phases = {group.phase for group in found}
    return Case(name, phases.pop() if len(phases) == 1 else "mixed", found)


def _group(text: str, part: str) -> Group:
    match = _GROUP.fullmatch(part)
    if not match or any(len(number or "") > 9 for number in match.groups()):
        raise UserError(f"--case {text}: {part!r} must be [N*]Q[@K][c][:D]")
    count, rows, drafts = int(match[1] or 1), int(match[2]), int(match[5] or 0)
    tokens = int(match[3] or rows)
    if not count or not rows or tokens < rows:
        raise UserError(f"--case {text}: {part!r} must have N and Q of at least 1, K at least Q")
    if drafts and rows != 1 + drafts:
        raise UserError(f"--case {text}: {part!r} must have Q = 1 + D query tokens")
    return Group(count, rows, tokens, drafts, bool(match[4]))


def phase_cases(
    cfg: Config,
    phases: list[str],
    batches: list[int],
    contexts: list[int],
    rows: list[int],
    replay: list[bool],
) -> Iterator[Case]:
    """One case a phase, batch and context; prompts are measured as ``configurations`` says."""
    for phase in phases:
        if phase == "prefill":
            for count in rows:
                yield from configurations(Case("prefill", phase, (Group(1, count, count),)), replay)
            continue
        drafts = cfg.dspark_block_size if phase == "verify" else 0
        width = {"verify": 1 + drafts, "replay": cfg.sliding_window}.get(phase, 1)
        for context in contexts:
            for batch in batches:
                group = Group(batch, min(width, context), context, drafts)
                yield Case(phase, phase, (group,))


def configurations(case: Case, replay: list[bool]) -> Iterator[Case]:
    """Replay off; on, without command buffers; on, with."""
    for on in replay:
        if on:
            yield replace(case, captured=False)
        yield replace(case, replay=on)


def dispatches(cfg: Config, case: Case, chunk: int) -> list[Dispatch]:
    """The engine's dispatches for a case, prompts in chunks of at most ``chunk`` rows. Pages are
    those of a pool in use: in no order.
    """
    shape = cache_shape([case])
    free = np.random.default_rng(0).permutation(shape.pages).tolist()
    found, slot = [], 0
    for group in case.groups:
        places = []
        for _ in range(group.count):
            own, free = free[: _pages(group)], free[_pages(group) :]
            places.append(Place(slot, tuple(own), 0, group.tokens))
            slot += 1
        found += _of_group(cfg, case, group, tuple(places), chunk)
    return found


def _of_group(
    cfg: Config, case: Case, group: Group, places: tuple[Place, ...], chunk: int
) -> list[Dispatch]:
    def dispatch(program: str, start: int, stop: int, hit: int = 0, rows: int = 0) -> Dispatch:
        bucket = Bucket(group.count, rows or stop - start, _pages(group))
        moved = tuple(replace(place, start=start, stop=stop, hit=hit) for place in places)
        return Dispatch(program, bucket, moved, group.tokens)

    before, window = group.tokens - group.rows, cfg.sliding_window
    if case.phase == "draft":
        return [dispatch("draft", before, group.tokens, rows=cfg.dspark_block_size)]
    replay = dispatch("replay", max(group.tokens - window, 0), group.tokens)
    if case.phase == "replay":
        return [replay]
    if group.phase != "prefill":
        return [dispatch(group.phase, before, group.tokens)]
    # Without replay the engine uses no cached prefix.
    cached = 0 if group.chunked or not case.replay else before // PAGE * PAGE
    hit = adopted_hit(cached, window)
    first = before if group.chunked else prefill_start(hit, window)
    program = "encode" if case.replay else "prefill_full"
    ends = [(at, min(at + chunk, group.tokens)) for at in range(first, group.tokens, chunk)]
    return [dispatch(program, *end, hit) for end in ends] + [replay] * case.replay


def cache_shape(cases: list[Case]) -> CacheShape:
    """Slots and pages for the largest case of each."""
    pages = [sum(group.count * _pages(group) for group in case.groups) for case in cases]
    return CacheShape(max(case.requests for case in cases), max(pages), PAGE)


def _pages(group: Group) -> int:
    """Pages of one request, which are the page table of its bucket."""
    return -(-(group.tokens + ROOM * bool(group.drafts)) // PAGE)
