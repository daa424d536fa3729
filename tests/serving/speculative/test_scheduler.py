"""The scheduler with drafts against the simulated device: blocks of random length, rejected rows
that leave rubbish behind, positions that the host learns a step later.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.request import Request, TokenLogprobs
from serving.scheduler import Limits, Plan
from serving.sequence import Sequence, Stage
from tests.serving.test_scheduler import PROMPTS, SIZE, Simulation, answer

DRAFTS = 5


@dataclass
class Blocks:
    """Of each sequence, drafts planned and tokens made."""

    made: list[tuple[Sequence, int, int]]


class Drafting(Simulation):
    """The device knows where each request stands, the host only what it has read."""

    def __init__(self, pages: int, seed: int, *, max_drafting: int, **options):
        super().__init__(pages, **options)
        self.limits = replace(self.limits, drafts=DRAFTS, max_drafting=max_drafting)
        self.scheduler.limits = self.limits
        self.rng = np.random.default_rng(seed)
        self.position: dict[Sequence, int] = {}

    def run(self, plan: Plan) -> Blocks:
        decode, plan.decode = plan.decode, []
        first = super().run(plan).sampled
        plan.decode = decode
        self.position |= {sequence: sequence.length for sequence in first}
        made = [(sequence, 0, 1) for sequence in first]
        for sequence in decode:
            drafts = sequence.drafts(plan.drafts)
            made.append((sequence, drafts, self.block(sequence, drafts)))
            sequence.dispatch(drafts)
        return Blocks(made)

    def block(self, sequence: Sequence, drafts: int) -> int:
        """Tokens of one verification; every row finds a page of its own."""
        start = self.position[sequence]
        room = sequence.length + sequence.request.max_new_tokens - 1 - start
        rows = min(1 + drafts, max(room, 0))
        count = int(self.rng.integers(1, rows + 1)) if rows else 0
        if count:
            self.write(sequence, start, start + count)
        for position in range(start + count, start + rows):
            page = sequence.pages[position // SIZE]
            assert self.pool.holders(page) == 1
            self.content[page][position % SIZE] = None
        self.position[sequence] = start + count
        return count

    def read(self, flight: Blocks | None) -> None:
        for sequence, drafts, count in flight.made if flight else ():
            sequence.settle(drafts, count)
            for _ in range(count):
                if sequence.stage is not Stage.DONE:
                    token = answer(sequence, len(sequence.result.token_ids))
                    sequence.result.add(TokenLogprobs(token, 0.0, ()), sequence.request)
                    if sequence.result.finish_reason:
                        self.scheduler.register(sequence)
                        self.scheduler.release(sequence)


REQUESTS = st.tuples(
    PROMPTS, st.integers(1, 16), st.integers(0, 2), st.sampled_from([(), (), (1,)]), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    seed=st.integers(0, 1 << 20),
    pages=st.integers(14, 24),
    slots=st.integers(1, 4),
    max_drafting=st.integers(1, 4),
    apart=st.integers(0, 3),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_row_finds_its_page(requests, seed, pages, slots, max_drafting, apart, switches):
    names = "replay", "prefix_cache", "overlap"
    options = dict(zip(names, switches, strict=True))
    sim = Drafting(pages, seed, max_drafting=max_drafting, slots=slots, **options)
    for prompt, new, priority, stop, speculative in requests:
        sim.add(prompt, new, priority, stop_ids=stop, speculative=speculative)
        for _ in range(apart):
            sim.step()
    sim.finish()
    for s in sim.sequences:
        assert s.result.token_ids == [answer(s, i) for i in range(len(s.result.token_ids))]


def test_blocks_end_a_request_early():
    sim = Drafting(40, 0, max_drafting=4, slots=1)
    sequence = sim.add([1] * 4, 40)
    steps = 0
    while not sim.idle:
        plan = sim.step()
        assert plan.drafts == (DRAFTS if plan.decode else 0)
        steps += bool(plan.decode)
    assert steps < 25 and len(sequence.result.token_ids) == 40
    sim.finish()


@pytest.mark.parametrize(("decoding", "drafts"), [(0, 0), (1, DRAFTS), (3, DRAFTS), (4, 0)])
def test_drafts_depend_on_the_batch_and_on_who_wants_them(decoding, drafts):
    limits = Limits(8, SIZE, 3, ((1, 6),), drafts=DRAFTS, max_drafting=3)
    wanted = [Sequence.of(Request((1,), 4), i) for i in range(decoding)]
    refused = [Sequence.of(Request((1,), 4, speculative=False), i) for i in range(decoding)]
    assert limits.drafts_for([wanted]) == drafts
    assert limits.drafts_for([refused]) == 0
    assert limits.drafts_for([[*wanted[:1], *refused[1:]]]) == drafts
    assert limits.drafts_for([[], refused[:1], wanted]) == drafts
