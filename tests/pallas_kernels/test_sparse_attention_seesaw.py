"""The attention kernel for long lists (``seesaw_ptx``) on a host machine whose warpgroups take
turns at random and whose wgmma reads its operands when it is waited for.
"""

from dataclasses import fields, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.numerics import SERVING
from pallas_kernels.quant.storage import LatentRows, WindowRows
from pallas_kernels.sparse_attention import seesaw_ptx
from pallas_kernels.sparse_attention.attend_shape import THREADS, Attend, Seesaw, seesaw
from pallas_kernels.sparse_attention.cases import Case
from tests.compare import cosines, rel_rms
from tests.pallas_kernels.test_sparse_attention import oracle, problem
from tests.pallas_kernels.test_sparse_attention_kernel import (
    BOUNDS,
    MBARRIER,
    Machine,
    attend,
    shape_of,
)

FLOOR = 180
BUSY = 999  # what waits: warpgroups whose turn it is not


class Late(Machine):
    """Registers and shared memory begin with garbage."""

    def __init__(self, lines, memory, *, seed: int, **options):
        super().__init__(lines, memory, **options)
        self.rng = np.random.default_rng(seed)
        self.flying: list[list[list]] = [[[]] for _ in range(3)]  # by warpgroup: committed groups
        self.group, self.steps = -1, 0
        for b in self.blocks:
            b.shared.data[:] = self.rng.integers(0, 256, b.shared.data.size)
            for register in b.registers.values():
                register[:] = self.rng.integers(0, 2 if register.dtype == bool else 1 << 31, b.n)

    def step(self, b):
        for code in set(b.waiting[b.waiting >= MBARRIER]):
            at, parity = divmod(int(code) - MBARRIER, 2)
            if self.passed(b, at, parity):
                b.waiting[b.waiting == code] = -1
        ready = ~b.done & (b.waiting < 0)
        groups = np.flatnonzero(ready.reshape(-1, 128).any(1))
        if len(groups) and (self.steps == 0 or self.group not in groups):
            self.group, self.steps = self.rng.choice(groups), int(self.rng.integers(1, 1500))
        self.steps -= 1
        hidden = ready & (np.arange(b.n) // 128 != self.group)
        b.waiting[hidden] = BUSY
        moved = super().step(b)
        b.waiting[hidden] = -1
        return moved

    def passed(self, b, at, parity) -> bool:
        return self.barriers[b.rank][int(at)][2] % 2 != parity

    def execute(self, b, opcode, args, active):
        if opcode.startswith("wgmma"):
            self.multiply_late(b, opcode.split("."), args, active)
        else:
            super().execute(b, opcode, args, active)

    def multiply_late(self, b, opcode, args, active):
        (group,) = np.flatnonzero(active[::128])
        flying = self.flying[group]
        if opcode[1] == "mma_async":
            operands = {name: b.read(name).copy() for name in args[1:4]}
            flying[-1].append((opcode[1:], args, operands, active.copy()))
        elif opcode[1] == "commit_group":
            flying.append([])
        elif opcode[1] == "wait_group":
            while len(flying) - 1 > int(args[0]):
                for rest, names, operands, on in flying.pop(0):
                    now = {name: b.registers[name] for name in operands}
                    b.registers.update(operands)
                    self.multiply(b, rest, names, on)
                    b.registers.update(now)


def run(case: Case, arguments: list, *, owners=None, ring=(0, 0), seed=0, **shape) -> np.ndarray:
    s = replace(shape_of(case, arguments, 1, 64), ring=ring[0], owners=ring[1])
    s = Seesaw(**{f.name: getattr(s, f.name) for f in fields(s)}, **shape)
    return attend(s, arguments, owners, seesaw_ptx.program(s), partial(Late, seed=seed))


def uneven() -> tuple[Case, list]:
    """Rows of one, two and three tiles."""
    case = Case(1, 5, 200, 70, 61, heads=8, window=64, page=8)
    arguments = problem(case, SERVING)
    selected, written = np.array(arguments[9]), np.array(arguments[4])
    selected[0, 2], selected[0, 3, 5:] = -1, -1
    written[:, : case.window - 30] = False
    selected[0, 0] = -1
    arguments[9], arguments[4] = jnp.asarray(selected), written
    arguments[6] = np.array([FLOOR], np.int32)
    return case, arguments


@pytest.mark.parametrize(("sms", "seed"), [(2, 0), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_uneven_rows_of_a_block(sms, seed):
    case, arguments = uneven()
    got = run(case, arguments, sms=sms, seed=seed)
    want = oracle(arguments, case, FLOOR)
    assert rel_rms(got, want) < BOUNDS["rel"]
    assert cosines(got, want).min() > BOUNDS["cosine"]
    alone = run(case, arguments, sms=5, seed=seed + 1)
    np.testing.assert_array_equal(got, alone)
    arguments[4][:] = False
    arguments[9] = jnp.full_like(arguments[9], -1)
    assert not run(case, arguments, sms=sms).any()


def test_all_heads_of_a_whole_list():
    case = Case(1, 1, 520, 512, 507, heads=64)
    arguments = problem(case, SERVING)
    got = run(case, arguments)
    assert rel_rms(got, oracle(arguments, case)) < BOUNDS["rel"]


def test_a_huge_score_moves_the_maximum():
    case, arguments = uneven()
    arguments[0] = 200 * arguments[0]
    got = run(case, arguments, sms=2)
    want = oracle(arguments, case, FLOOR)
    assert np.isfinite(got).all() and rel_rms(got, want) < 2e-2


@pytest.mark.parametrize(
    "word",
    [-1, pytest.param(0x7149F2CA, marks=pytest.mark.slow)],
    ids=["nan", "1e30"],
)
def test_what_is_not_seen_changes_no_bit(word):
    case, arguments = uneven()
    want = run(case, arguments, sms=2)
    window, written, pool, table, selected = (arguments[i] for i in (3, 4, 7, 8, 9))
    used = np.zeros(pool.words.shape[:2], bool)
    entries = np.unique(selected)[1:]
    used[table[0, entries // case.page], entries % case.page] = True
    arguments[3] = WindowRows(jnp.where(written[..., None], window.words, word))
    arguments[7] = LatentRows(jnp.where(used[..., None], pool.words, word))
    np.testing.assert_array_equal(run(case, arguments, sms=1), want)


def test_a_ring_is_read_in_place():
    case, arguments = uneven()
    want = run(case, arguments, sms=2)
    rows, written, size = np.asarray(arguments[3].words), arguments[4], 128
    ring, tags = np.full((3, size, 132), -1, np.int32), np.full((3, size), -1, np.int32)
    for (_, i), there in np.ndenumerate(written):
        at = case.start - case.window + 1 + i
        ring[1, at % size], tags[1, at % size] = rows[0, i], at if there else at - size
    stored = [*arguments[:3], WindowRows(jnp.asarray(ring)), tags, *arguments[5:]]
    got = run(case, stored, owners=np.array([1], np.int32), ring=(size, 3), sms=2)
    np.testing.assert_array_equal(got, want)


def test_which_lists_it_takes():
    long = Attend(128, 1, 64, 128, 512, 64, 64, 64).in_tiles()
    there = seesaw(long)
    assert there and there.fits and there.grid == 128 and there.tiles == 10
    assert seesaw(replace(long, splits=4)) is None and seesaw(replace(long, window=72)) is None
    assert seesaw(replace(long, selected=0, window=64)) is None
    registers = 2 * seesaw_ptx.CONSUMING + seesaw_ptx.PRODUCING
    assert registers * 128 <= 65536 // THREADS // 8 * 8 * THREADS
    with pytest.raises(ValueError, match="must have one block a row"):
        replace(there, window=72)
