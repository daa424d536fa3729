"""The peer-to-peer gather's own PTX on host machines that share memory, beside sums and alone."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.all_reduce import exchange_ptx, gather_ptx, kernel_sm90
from pallas_kernels.all_reduce.exchange import HALVES, SENTINEL, THREADS, Exchange, Gather
from pallas_kernels.all_reduce.ref import sent
from tests.pallas_kernels.peer_machine import Launch
from tests.pallas_kernels.test_all_reduce_kernel import World, draw, operations, sums

__all__ = ["operations"]
I32 = np.int32
TWO = Exchange(2, 1, 8, room=4096)
FOUR = Exchange(4, 1, 8, room=4096)
THREE = Exchange(3, 1, 8, room=4096)
ROWS, MANY, BITS = (3, 80, False), (2, 1040, False), (3, 64, True)  # 130 vectors: two blocks


def drawn(rng, g: Gather, calls: int) -> np.ndarray:
    """Words [calls, ranks, R, N], zeros and the sentinel among them; each rank has its own rows of
    a union.
    """
    shape = calls, g.exchange.ranks, g.rows, g.nbytes // 4
    words = rng.integers(0, 1 << 32, shape, np.uint32)
    words = np.where(rng.random(shape) < 0.1, rng.choice([0, SENTINEL, 1 << 31], shape), words)
    if g.union:
        owner = rng.integers(0, g.exchange.ranks, g.rows)
        words = np.where(np.arange(shape[1])[:, None, None] == owner[:, None], words, 0)
    return words.astype(np.uint32).view(I32)


def wanted(g: Gather, words: np.ndarray) -> np.ndarray:
    """Of one call, what ``ref.gather`` gives on every rank."""
    ranks = [np.asarray(sent(jnp.asarray(part))) for part in words]
    found = np.bitwise_or.reduce(ranks) if g.union else np.concatenate(ranks, axis=1)
    return found.view(I32)


class Gathers(World):
    """Launches of gathers, and of sums between them."""

    def start(self, g: Gather, half: int, words: np.ndarray) -> tuple[list, list[Launch]]:
        """Where every rank's result will be, and its launch."""
        lines, places, launches = gather_ptx.program(g, half), [], []
        for rank, at in enumerate(self.place(*words)):
            out = np.full((g.rows + 2, g.result // 4), -7, I32)
            places.append((self.memory.place(out), out))
            operands = [at, self.tables[rank], places[-1][0] + out[0].nbytes]
            blocks = [[*operands, block] for block in range(g.grid)]
            launches.append(Launch(lines, THREADS, blocks))
        return places, launches

    def sum(self, values: np.ndarray, slot: int) -> tuple[list, list[Launch]]:
        e, lines = self.e, exchange_ptx.program(self.e, slot)
        places = [self.output(e.rows, e.width) for _ in range(e.ranks)]
        blocks = [
            [[at, self.tables[rank], places[rank][0], 0]]
            for rank, at in enumerate(self.place(*values))
        ]
        return places, [Launch(lines, THREADS, each) for each in blocks]

    def found(self, place: tuple[int, np.ndarray]) -> np.ndarray:
        at, out = place
        words = self.memory.read(at, out)
        assert (words[[0, -1]] == -7).all(), "written outside"
        return words[1:-1]

    def gather(self, g: Gather, words: np.ndarray) -> list[list[np.ndarray]]:
        """Calls in succession, in alternate halves."""
        started = [self.start(g, i % HALVES, call) for i, call in enumerate(words)]
        self.run([[launches[rank] for _, launches in started] for rank in range(g.exchange.ranks)])
        return [[self.found(place) for place in places] for places, _ in started]


@pytest.mark.parametrize(
    ("e", "shape"),
    [(TWO, ROWS), pytest.param(TWO, MANY, marks=pytest.mark.slow), (FOUR, BITS)],
    ids=str,
)
def test_every_rank_has_the_words_of_all(e, shape, rng):
    g = Gather(e, *shape)
    world = Gathers(e, 3)
    for _ in range(2):
        words = drawn(rng, g, HALVES)
        for call, ranks in zip(words, world.gather(g, words), strict=True):
            for found in ranks:
                np.testing.assert_array_equal(found, wanted(g, call))
    assert world.faults() == [0] * e.ranks
    for rank in range(e.ranks):
        assert (world.words(rank)[e.gathers // 4 :] == SENTINEL).all(), "not cleared"


def test_a_thread_takes_several_vectors(monkeypatch, rng):
    """More rows than threads that may run at once."""
    monkeypatch.setattr("pallas_kernels.all_reduce.exchange.RESIDENT", 1)
    g = Gather(TWO, 4, 528, False)
    assert (g.vectors, g.grid) == (132, 1)
    words = drawn(rng, g, HALVES)
    for call, ranks in zip(words, Gathers(TWO, 1).gather(g, words), strict=True):
        np.testing.assert_array_equal(ranks[1], wanted(g, call))


def test_one_half_is_enough_with_a_sum_between(rng):
    """As at the end of a step and the beginning of the next: sums in all slots, one half."""
    e, world = THREE, Gathers(THREE, 0)
    g = Gather(e, 2, 48, False)
    for _ in range(2):
        words, values = drawn(rng, g, 3), draw(rng, e, 3)
        started = []
        for slot in range(3):
            started += [world.sum(values[slot], slot), world.start(g, 0, words[slot])]
        world.run([[launches[rank] for _, launches in started] for rank in range(e.ranks)])
        for slot in range(3):
            (summed, _), (gathered, _) = started[2 * slot : 2 * slot + 2]
            for rank in range(e.ranks):
                assert world.result(summed[rank]).tobytes() == sums(values)[slot].tobytes()
                np.testing.assert_array_equal(world.found(gathered[rank]), wanted(g, words[slot]))
    assert world.faults() == [0] * e.ranks


@pytest.mark.parametrize("fault", ["never cleared", "one half"])
def test_the_machine_finds_a_broken_protocol(fault, monkeypatch, rng):
    g = Gather(replace(TWO, timeout_s=2e-4), 2, 48, False)
    assert not any(_goes_wrong(g, seed, rng) for seed in range(3))
    if fault == "never cleared":
        monkeypatch.setattr(gather_ptx, "clear", lambda e, at, stride: [])
    else:
        plain = gather_ptx.program
        monkeypatch.setattr(gather_ptx, "program", lambda g, half: plain(g, 0))
    assert any(_goes_wrong(g, seed, rng) for seed in range(3))


def _goes_wrong(g: Gather, seed: int, rng) -> bool:
    world, words = Gathers(g.exchange, seed), drawn(rng, g, 6)
    found = world.gather(g, words)
    return any(world.faults()) or any(
        not np.array_equal(one, wanted(g, call))
        for call, ranks in zip(words, found, strict=True)
        for one in ranks
    )


def test_a_rank_that_does_not_answer_is_named(monkeypatch, rng):
    monkeypatch.setattr(exchange_ptx, "POLLS", 4)
    e = replace(FOUR, timeout_s=2e-4)
    world, g = Gathers(e, 0), Gather(e, 3, 64, True)
    places, launches = world.start(g, 0, drawn(rng, g, 1)[0])
    world.run([[] if rank == 2 else [one, one] for rank, one in enumerate(launches)])
    for rank in (0, 1, 3):
        assert world.faults()[rank] == 3
        assert np.isnan(world.found(places[rank]).view(jnp.bfloat16).astype(float)).all()


def test_bad_arguments_name_the_value():
    with pytest.raises(ValueError, match=r"self.room=8 must be a multiple of 16, or 0"):
        Exchange(2, 1, 8, room=8)
    with pytest.raises(ValueError, match=r"self.rows=1 x self.nbytes=8 must be rows of whole 16"):
        Gather(TWO, 1, 8, False)
    with pytest.raises(ValueError, match=r"must fit in self.exchange.room=4096 bytes"):
        Gather(TWO, 257, 16, False)
    x, table = jnp.zeros((1, 4), jnp.float32), jnp.zeros((1, TWO.table_words), jnp.int32)
    with pytest.raises(ValueError, match=r"half=2 must be 0 to 1"):
        kernel_sm90.gather(x, table, x, exchange=TWO, half=2, union=False)
