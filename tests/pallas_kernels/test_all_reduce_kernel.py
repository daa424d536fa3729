"""The peer-to-peer all-reduce's own PTX on host machines that share memory: slots, stale data, the
sentinel, a rank that never answers.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.all_reduce import exchange_ptx, fused_ptx, kernel_sm90, ref
from pallas_kernels.all_reduce.exchange import SENTINEL, SLOTS, THREADS, Exchange
from pallas_kernels.mhc import fused_ptx as mhc_ptx
from pallas_kernels.mhc.fused_ptx import Fused
from tests.pallas_kernels.peer_machine import Gpu, Launch, run_together
from tests.pallas_kernels.ptx_operations import OPERATIONS, pairs
from tests.pallas_kernels.ptx_strict import Guarded
from tests.pallas_kernels.test_mhc_kernel import approximate, fused_inputs, fused_multiply_add

BF16 = jnp.bfloat16
NORM_EPS = 1e-20
CANARY = -7.0
CALLS = 2  # of the fused kernel
ONE_SHOT = Exchange(2, 3, 104)  # 39 threads: a warp and a part of one
TWO_BLOCKS = Exchange(2, 1, 1064)  # 133 threads
THREE = Exchange(3, 2, 104)
TWO_SHOT = Exchange(4, 36, 8)


@pytest.fixture(autouse=True)
def operations(monkeypatch):
    plain = OPERATIONS["add"]

    def add(rest, a, b):
        return pairs(a, b, np.add) if rest[-1] == "bf16x2" else plain(rest, a, b)

    monkeypatch.setitem(OPERATIONS, "add", add)
    monkeypatch.setitem(OPERATIONS, "fma", fused_multiply_add)
    monkeypatch.setitem(OPERATIONS, "rsqrt", approximate(lambda x: x**-0.5))


class World:
    """Ranks with shared memory as ``sharding.peer`` makes it; slots keep what they hold between
    ``run``s.
    """

    def __init__(self, e: Exchange, seed: int, size: int = 1 << 22):
        self.e, self.rng, self.memory = e, np.random.default_rng(seed), Guarded(size)
        empty = np.full(e.words, SENTINEL, np.uint32)
        empty[e.fault // 4 : e.gathers // 4] = 0
        self.slots = [self.memory.place(empty) for _ in range(e.ranks)]
        self.tables = [
            self.memory.place(np.array([*self.slots, rank], np.uint64)) for rank in range(e.ranks)
        ]

    def place(self, *arrays: np.ndarray) -> list[int]:
        return [self.memory.place(np.ascontiguousarray(array)) for array in arrays]

    def output(self, *shape: int) -> tuple[int, np.ndarray]:
        """Rows between two canary rows: the address of the first of them."""
        canvas = np.full((shape[0] + 2, *shape[1:]), CANARY, BF16)
        return self.memory.place(canvas) + canvas[0].nbytes, canvas

    def result(self, output: tuple[int, np.ndarray]) -> np.ndarray:
        at, canvas = output
        values = self.memory.read(at - canvas[0].nbytes, canvas)
        assert (values[[0, -1]] == canvas[[0, -1]]).all()
        return values[1:-1]

    def run(self, launches: list[list[Launch]]) -> None:
        spans = [range(at, at + 4 * self.e.words) for at in self.slots]
        gpus = [
            Gpu(self.memory, each, own, np.random.default_rng(self.rng.integers(1 << 30)))
            for each, own in zip(launches, spans, strict=True)
        ]
        run_together(gpus, self.rng)
        for gpu in gpus:
            gpu.land(1.0)

    def reduce(self, values: np.ndarray, programs: list[list[str]]) -> np.ndarray:
        """values, and the result, [calls, ranks, R, D]."""
        e = self.e
        outputs = [[self.output(e.rows, e.width) for _ in calls] for calls in values]
        launches = [
            [
                Launch(
                    programs[i % len(programs)],
                    THREADS,
                    [
                        [at, self.tables[rank], outputs[i][rank][0], block]
                        for block in range(e.grid)
                    ],
                )
                for i, at in enumerate(self.place(*values[:, rank]))
            ]
            for rank in range(e.ranks)
        ]
        self.run(launches)
        return np.stack([[self.result(one) for one in call] for call in outputs])

    def words(self, rank: int) -> np.ndarray:
        return self.memory.read(self.slots[rank], np.zeros(self.e.words, np.uint32))

    def faults(self) -> list[int]:
        return [int(self.words(rank)[self.e.fault // 4]) for rank in range(self.e.ranks)]


def draw(rng, e: Exchange, calls: int) -> np.ndarray:
    """Values of one step and one rank differ from those of any other; zeros of both signs, the
    least and the greatest numbers among them.
    """
    values = rng.standard_normal((calls, e.ranks, e.rows, e.width)).astype(BF16)
    special = np.array([-0.0, 0.0, 9.2e-41, -9.2e-41, 3.3e38, -3.3e38, 1.5], BF16)
    chosen = rng.random(values.shape) < 0.2
    return np.where(chosen, rng.choice(special, values.shape), values)


def programs_of(e: Exchange) -> list[list[str]]:
    return [exchange_ptx.program(e, slot) for slot in range(SLOTS)]


def sums(values: np.ndarray) -> np.ndarray:
    """Over the ranks, without the flush of the least numbers that XLA does on a CPU."""
    with np.errstate(over="ignore", invalid="ignore"):
        first, *others = np.moveaxis(values.astype(np.float32), 1, 0)
        return (sum(others, first + np.float32(0))).astype(BF16)


def test_reference_is_the_sum_in_float32_in_order(rng):
    values = rng.standard_normal((2, 5, 3, 64)).astype(BF16)
    values[0, :, 0, :8] = -0.0
    want = sums(values)
    assert (
        np.asarray(ref.sum_of(jnp.moveaxis(jnp.asarray(values), 1, 0))).tobytes() == want.tobytes()
    )


@pytest.mark.parametrize(
    ("e", "seed"),
    [(ONE_SHOT, 0), (ONE_SHOT, 1), (TWO_BLOCKS, 2), (THREE, 3), (TWO_SHOT, 4)],
    ids=str,
)
def test_sums_have_the_bits_of_the_reference_on_every_rank(e, seed, rng):
    world = World(e, seed)
    for _ in range(2):
        values = draw(rng, e, SLOTS)
        got, want = world.reduce(values, programs_of(e)), sums(values)
        for rank in range(e.ranks):
            assert got[:, rank].tobytes() == want.tobytes()
    assert world.faults() == [0] * e.ranks
    assert not e.two_shot or e is TWO_SHOT


def test_no_word_that_is_sent_is_the_sentinel():
    """Negative zeros everywhere, of which the sentinel is made, and sums that cancel."""
    e = TWO_SHOT
    values = np.full((SLOTS, e.ranks, e.rows, e.width), -0.0, BF16)
    values[1, :2], values[2] = [[[3.0]], [[-3.0]]], -1e-40
    got = World(e, 0).reduce(values, programs_of(e))
    assert not (got[:2].view(np.uint16)).any()
    assert got[2].tobytes() == np.broadcast_to(sums(values)[2:, None], got[2:].shape).tobytes()


def test_nan_and_infinity_reach_every_rank(rng):
    values = draw(rng, THREE, SLOTS)
    values[0, 1, 0, 5], values[1, 2, 1, 7], values[2, 0, 0, 0] = np.nan, np.inf, -np.inf
    got, want = World(THREE, 1).reduce(values, programs_of(THREE)), sums(values)
    for rank in range(THREE.ranks):
        assert np.array_equal(got[:, rank].astype(float), want.astype(float), equal_nan=True)
    assert np.isnan(got[0, :, 0, 5].astype(float)).all()


@pytest.mark.parametrize("e", [ONE_SHOT, TWO_SHOT], ids=str)
def test_slots_are_empty_when_they_come_round(e, rng):
    """Behind a step only what its last call read is still there."""
    world = World(e, 5)
    world.reduce(draw(rng, e, SLOTS), programs_of(e))
    for rank in range(e.ranks):
        words = world.words(rank)[: e.fault // 4]
        first = words[: e.sums // 4].reshape(SLOTS, -1)
        second = words[e.sums // 4 :].reshape(SLOTS, -1)
        assert (first[:2] == SENTINEL).all() and (second[:2] == SENTINEL).all()
        assert (first[2] != SENTINEL).any()


@pytest.mark.parametrize("fault", ["stale", "too early"])
def test_the_machine_finds_a_broken_protocol(fault, monkeypatch, rng):
    """Slots that nobody clears give old values; clearing what the next call receives loses some."""
    e = replace(ONE_SHOT, timeout_s=1e-6)
    if fault == "stale":
        monkeypatch.setattr(exchange_ptx, "clear", lambda e, at, stride: [])
    else:
        monkeypatch.setattr(exchange_ptx, "POLLS", 16)
        clear, size = exchange_ptx.clear, e.ranks * e.part
        later = {slot * size: (slot + 2) % SLOTS * size for slot in range(SLOTS)}
        monkeypatch.setattr(
            exchange_ptx, "clear", lambda e, at, stride: clear(e, later[at], stride)
        )
    world, values = World(e, 0), draw(rng, e, 2 * SLOTS)
    got, want = world.reduce(values, programs_of(e)), sums(values)
    wrong = any(got[:, rank].tobytes() != want.tobytes() for rank in range(e.ranks))
    assert wrong or any(world.faults())


@pytest.mark.parametrize(("e", "late"), [(ONE_SHOT, 1), (THREE, 0), (TWO_SHOT, 2)], ids=str)
def test_a_rank_that_does_not_answer_is_named(e, late, monkeypatch, rng):
    """The others end, with NaN and the number of the silent one, and so do the calls behind."""
    monkeypatch.setattr(exchange_ptx, "POLLS", 4)
    e = replace(e, timeout_s=2e-4)
    world, values = World(e, 0), draw(rng, e, SLOTS)
    outputs = [world.output(e.rows, e.width) for _ in range(e.ranks)]
    launches = []
    for rank, at in enumerate(world.place(*values[0])):
        operands = [[at, world.tables[rank], outputs[rank][0], b] for b in range(e.grid)]
        one = Launch(exchange_ptx.program(e, 0), THREADS, operands)
        launches.append([] if rank == late else [one, one])
    world.run(launches)
    for rank in range(e.ranks):
        if rank != late:
            assert world.faults()[rank] == late + 1
            assert np.isnan(world.result(outputs[rank]).astype(float)).any()


def test_the_report_is_the_error_word():
    world = World(THREE, 0)
    words = world.memory.data.view(np.uint32)
    for rank in range(3):
        words[(world.slots[rank] + THREE.fault) // 4] = (0, 3, 1)[rank]
    outs = [world.memory.place(np.full(1, -1, np.int32)) for _ in range(3)]
    lines = exchange_ptx.report_program(THREE)
    world.run([[Launch(lines, 128, [[world.tables[r], outs[r]]])] for r in range(3)])
    assert [int(world.memory.read(at, np.zeros(1, np.int32))[0]) for at in outs] == [0, 3, 1]


@pytest.mark.parametrize(("rows", "width"), [(2, 264), (1, 1024)])
def test_fused_is_the_sum_and_then_the_pass_over_the_streams(rows, width, rng):
    e = Exchange(2, rows, width)
    s = Fused(e.rows, width, e.rows, NORM_EPS)
    shared = fused_inputs(rng, e.rows, width)
    parts = draw(rng, e, CALLS)
    parts = np.where(np.abs(parts.astype(np.float32)) > 1e30, BF16(1), parts)
    world = World(e, 0)
    h, post, comb, pre, weight = world.place(*(a for i, a in enumerate(shared) if i != 1))
    places = [[world.place(part)[0] for part in call] for call in parts]

    def outputs() -> tuple:
        return world.output(e.rows, 4 * width), world.output(e.rows, width)

    fused = [[outputs() for _ in range(e.ranks)] for _ in range(CALLS)]
    launches = [[] for _ in range(e.ranks)]
    for slot, call in enumerate(fused):
        lines = fused_ptx.program(e, slot, NORM_EPS)
        for rank, (streams, normed) in enumerate(call):
            common = [h, places[slot][rank], post, comb, pre, weight, streams[0], normed[0]]
            operands = [[*common, world.tables[rank], 0, row] for row in range(e.rows)]
            launches[rank].append(Launch(lines, s.threads, operands, 4 * s.words))
    world.run(launches)
    totals = world.place(*sums(parts))
    plain = [outputs() for _ in range(CALLS)]
    one = []
    for total, (streams, normed) in zip(totals, plain, strict=True):
        common = [h, total, post, comb, pre, weight, streams[0], normed[0], 0]
        operands = [[*common, row] for row in range(e.rows)]
        one.append(Launch(mhc_ptx.program(s), s.threads, operands, 4 * s.words))
    world.run([one, []])
    for call, want in zip(fused, plain, strict=True):
        for got in call:
            for a, b in zip(got, want, strict=True):
                assert world.result(a).tobytes() == world.result(b).tobytes()


def test_one_crossing_for_two_ranks_and_for_few_rows():
    assert not any(Exchange(2, rows, 5120).two_shot for rows in (1, 8, 64))
    assert [Exchange(8, rows, 5120).two_shot for rows in (1, 16, 17, 64)] == [
        False,
        False,
        True,
        True,
    ]
    assert [Exchange(4, rows, 5120).two_shot for rows in (32, 33)] == [False, True]
    assert not Exchange(3, 64, 8).two_shot  # does not divide
    assert [Exchange(2, rows, 5120).grid for rows in (1, 8, 64)] == [5, 40, 320]


def test_bad_arguments_name_the_value():
    with pytest.raises(ValueError, match=r"self.ranks=1 must be 2 to 16"):
        Exchange(1, 1, 8)
    with pytest.raises(ValueError, match=r"self.rows=65 must be 1 to 64"):
        Exchange(2, 65, 8)
    with pytest.raises(ValueError, match=r"self.width=12 must be a positive multiple of 8"):
        Exchange(2, 1, 12)
    with pytest.raises(ValueError, match=r"self.width=16384 must be at most 8448"):
        Exchange(2, 64, 16384)
    with pytest.raises(ValueError, match=r"self.timeout_s=0 must be above 0 and at most 60"):
        Exchange(2, 1, 8, timeout_s=0)
    e = Exchange(2, 4, 64)
    x, table = jnp.zeros((4, 64), BF16), jnp.zeros((1, e.table_words), jnp.int32)
    with pytest.raises(ValueError, match=r"slot=3 must be 0 to 2"):
        kernel_sm90.all_reduce(x, table, x, exchange=e, slot=3)
    with pytest.raises(ValueError, match=r"x: array.shape=\(3, 64\) .* must be \(4, 64\) bfloat16"):
        kernel_sm90.all_reduce(x[:3], table, x, exchange=e, slot=0)
    wide = Exchange(2, 1, 5128)
    with pytest.raises(ValueError, match=r"e.width=5128 must be at most 5120"):
        norm_of(wide)
    with pytest.raises(
        ValueError, match=r"e.rows=64 over e.ranks=4 must be summed in one crossing"
    ):
        norm_of(Exchange(4, 64, 64))


def norm_of(e: Exchange):
    many = partial(jnp.zeros, dtype=jnp.float32)
    mix, r, d = many((e.rows, 4)), e.rows, e.width
    h, y, weight = (jnp.zeros(shape, BF16) for shape in ((r, 4, d), (r, d), (d,)))
    table = jnp.zeros((1, e.table_words), jnp.int32)
    streams = h, y, mix, many((r, 4, 4)), mix, weight
    return kernel_sm90.all_reduce_norm(*streams, table, y, exchange=e, slot=0, norm_eps=NORM_EPS)
