"""The attention kernel's own PTX on a host machine (``ptx_machine``), against float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.quant.storage import LatentRows, WindowRows
from pallas_kernels.sparse_attention import kernel_sm90, op, ref
from pallas_kernels.sparse_attention.attend_ptx import program
from pallas_kernels.sparse_attention.attend_shape import (
    CONSUMING_REGISTERS,
    MAX_SCALE_BYTE,
    PRODUCING_REGISTERS,
    THREADS,
    Attend,
)
from pallas_kernels.sparse_attention.cases import Case, inputs, xla_path
from tests.compare import cosines, rel_rms
from tests.pallas_kernels import ptx_machine as pm
from tests.pallas_kernels.test_sparse_attention import oracle, problem, sparse_attention

MBARRIER = 2000  # a thread that waits for the barrier at ``at`` has this + 2 at + parity


class Machine(pm.Cluster):
    """Adds barriers in shared memory, swizzled wgmma operands and a block's part barriers."""

    def __init__(self, lines, memory, **options):
        super().__init__(lines, memory, **options)
        self.barriers: list[dict[int, list[int]]] = [{} for _ in self.blocks]

    def step(self, b):
        for code in set(b.waiting[b.waiting >= MBARRIER]):
            at, parity = divmod(int(code) - MBARRIER, 2)
            if self.barriers[b.rank][at][2] % 2 != parity:
                b.waiting[b.waiting == code] = -1
        return super().step(b)

    def execute(self, b, opcode, args, active):
        name, *rest = opcode.split(".")
        if name == "mbarrier":
            self.barrier(b, rest, args, active)
        elif opcode == "barrier.sync":
            b.waiting[active] = int(args[0])
            if (b.waiting == int(args[0])).sum() == int(args[1]):
                b.waiting[b.waiting == int(args[0])] = -1
        elif name in ("setmaxnreg", "bar"):
            assert (active.reshape(-1, 32).all(1) == active.reshape(-1, 32).any(1)).all()
        elif name == "wgmma" and rest[0] == "mma_async":
            self.multiply(b, rest, args, active)
        elif name == "redux":
            values = np.where(active, b.read(args[1]), 0).reshape(-1, 32).max(1)
            b.write(args[0], np.repeat(values, 32), active)
        elif name in FLOATS and rest[-1] == "f32":
            values = [b.read(a).astype(np.uint32).view(np.float32) for a in args[1:]]
            with np.errstate(all="ignore"):
                out = FLOATS[name](*values).astype(np.float32)
            b.write(args[0], out.view(np.uint32).astype(np.uint64), active)
        else:
            super().execute(b, opcode, args, active)

    def atomic(self, b, memory, name, rest, index, args, on):
        assert "max" in rest
        words = memory.data.view(np.uint32)
        np.maximum.at(words, index // 4, b.read(args[-1])[on].astype(np.uint32))

    def barrier(self, b, rest, args, active):
        base, _, offset = (
            args[1 if rest[0] in ("try_wait", "arrive") else 0].strip("[]").partition("+")
        )
        address = b.read(base).astype(np.int64) + int(offset or 0)
        held = self.barriers[b.rank]
        if rest[0] == "init":
            held[int(address[active][0])] = [int(args[1]), int(args[1]), 0]
        elif rest[0] == "arrive":
            for at in address[active]:
                barrier = held[int(at)]
                barrier[1] -= 1
                if barrier[1] == 0:
                    barrier[1], barrier[2] = barrier[0], barrier[2] + 1
        else:
            b.write(args[0], np.ones(b.n, bool), active)
            b.waiting[active] = MBARRIER + 2 * address[active] + b.read(args[2])[active].astype(int)

    def multiply(self, b, rest, args, active):
        """m64nNk16 of bf16; operands in shared memory lie in 128-byte swizzles."""
        columns = int(rest[3].removeprefix("m64n").removesuffix("k16"))
        product = np.zeros((b.n // 32, 16, columns), np.float32)
        left = pm._fragment(b, pm._names(args[1])) if args[1][0] == "{" else None
        transposed = args[-1] == "1"
        k = np.arange(16)
        for group in np.flatnonzero(active[::128]):
            assert active[128 * group : 128 * group + 128].all()
            warps = slice(4 * group, 4 * group + 4)
            matrix = swizzled(b, int(b.read(args[2])[128 * group]), columns, k, transposed)
            if left is None:
                a = swizzled(b, int(b.read(args[1])[128 * group]), 64, k, False)
                product[warps] = (a @ matrix.T).reshape(4, 16, columns)
            else:
                product[warps] = left[warps] @ matrix.T
        pm._accumulate(b, pm._names(args[0]), product, b.read(args[3]), active)


FLOATS = {
    "ex2": np.exp2,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "neg": np.negative,
    "div": np.divide,
}


def swizzled(b, descriptor: int, rows: int, k: np.ndarray, transposed: bool) -> np.ndarray:
    """An operand [rows, 16] of a 128-byte swizzled layout; transposed: rows are contiguous."""
    assert descriptor >> 62 == 1
    start, leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
    row = np.arange(rows)[:, None]
    if transposed:
        at = row // 64 * leading + row % 64 * 2 + k // 8 * stride + k % 8 * 128
    else:
        at = row // 8 * stride + row % 8 * 128 + 2 * k
    at = start + at
    at ^= at >> 3 & 0x70
    bits = b.shared.data.view(np.uint16)[at // 2].astype(np.uint32) << 16
    return bits.view(np.float32)


def attend(
    s: Attend,
    arguments: list,
    owners: np.ndarray | None = None,
    lines: list[str] | None = None,
    machine: Callable = Machine,
    ahead: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The kernel's output [B, T, H, 512] between two canaries; window and ``written`` are rings and
    their tags where the shape says so. Another program may take several rows to a block. ahead: the
    arrays of ``s.ahead``.
    """
    q, cos, sin, window, written, position, floor, pool, table, selected, sink = arguments
    owners = np.asarray(floor) if owners is None else owners
    latents = pool.words if s.selected else window.words
    chosen = selected if s.selected else position
    planes = [q, cos, sin, window.words, jnp.asarray(written, jnp.int32), position]
    planes += [floor, owners, latents, table, chosen, sink.astype(jnp.float32), *ahead]
    memory = pm.Memory(1 << 24)
    places = [memory.place(np.asarray(a)) for a in planes]
    canary = np.full((s.rows * s.groups + 2, s.heads, 512), 0x7FC1, np.uint16)
    out = memory.place(canary)
    lines = lines or program(s)
    for row in range(s.grid):
        operands = [*places, out + canary[0].nbytes, 0, row]
        machine(
            lines,
            memory,
            threads=THREADS,
            shared=4 * s.words,
            operands=lambda rank, operands=operands: [*operands, rank],
            blocks=s.splits,
        ).run()
    result = memory.read(out, canary)
    assert (result[[0, -1]] == 0x7FC1).all()
    return (result[1:-1].astype(np.uint32) << 16).view(np.float32).reshape(q.shape)


BOUNDS = {"rel": 5e-3, "cosine": 0.9999}  # bf16 probabilities and outputs: 2^-9 each
SHAPES = [
    # case, blocks a row, slots a tile
    (Case(1, 1, 520, 512, 512, heads=64), 1, 64),
    (Case(1, 1, 520, 512, 507, heads=8), 8, 80),
    (Case(1, 1, 520, 256, 250, heads=8), 1, 64),
    (Case(1, 1, 520, 512, 300, heads=16), 16, 48),
    (Case(1, 1, 90, 60, 51, heads=32, window=64, page=7), 2, 48),
    (Case(2, 2, 5, 8, 3, heads=8, window=16, page=8), 1, 80),
    (Case(1, 1, 100, 0, 0, heads=16, window=128), 4, 64),
    (Case(1, 1, 0, 24, 0, heads=8, window=16), 1, 48),
]


def shape_of(
    case: Case, arguments: list, splits: int = 1, tile: int = 48, groups: int = 1
) -> Attend:
    pool, table = arguments[7:9]
    page, count = (case.page, pool.words.shape[0]) if case.selected else (1, 1)
    return Attend(
        case.requests * case.rows, case.rows, case.heads // groups, case.window, case.selected,
        table.shape[1] if case.selected else 1, page, count, splits, tile, groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize(("case", "splits", "tile"), SHAPES, ids=str)
def test_equals_the_oracle(case, splits, tile):
    arguments = problem(case, SERVING)
    got = attend(shape_of(case, arguments, splits, tile), arguments)
    want = oracle(arguments, case)
    assert rel_rms(got, want) < BOUNDS["rel"]
    assert cosines(got, want).min() > BOUNDS["cosine"]


def small() -> tuple[Case, list]:
    case = Case(2, 2, 20, 24, 13, heads=8, window=16, page=8)
    arguments = problem(case, SERVING)
    arguments[4] = np.array(arguments[4])
    return case, arguments


def test_heads_of_a_row_in_two_clusters_have_the_same_bits():
    case = Case(1, 2, 100, 24, 13, heads=16, window=16, page=8)
    arguments = problem(case, SERVING)
    arguments[10] = jnp.linspace(-2, 2, case.heads)
    want = attend(shape_of(case, arguments, 2), arguments)
    np.testing.assert_array_equal(attend(shape_of(case, arguments, 2, groups=2), arguments), want)
    assert rel_rms(want, oracle(arguments, case)) < BOUNDS["rel"]


@pytest.mark.parametrize(("splits", "word"), [(1, -1), (2, 0x7149F2CA)], ids=["nan", "1e30"])
def test_what_is_not_seen_changes_no_bit(splits, word):
    """Unwritten window rows, entries nobody selected; and the neighbours in the batch."""
    case, arguments = small()
    arguments[4][:, :5] = False
    s = shape_of(case, arguments, splits, 48)
    want = attend(s, arguments)
    window, written, pool, table, selected = (arguments[i] for i in (3, 4, 7, 8, 9))
    used = np.zeros(pool.words.shape[:2], bool)
    for i in range(case.requests):
        entries = np.unique(selected[i])[1:]
        used[table[i, entries // case.page], entries % case.page] = True
    assert not used.all()
    arguments[3] = type(window)(jnp.where(written[..., None], window.words, word))
    arguments[7] = type(pool)(jnp.where(used[..., None], pool.words, word))
    np.testing.assert_array_equal(attend(s, arguments), want)
    second = jax.tree.map(lambda x: x[1:], arguments)
    second[7], second[10] = arguments[7], arguments[10]
    np.testing.assert_array_equal(attend(replace(s, rows=case.rows), second), want[1:])


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_sees_nothing_is_zero(splits):
    case, arguments = small()
    arguments[4][:] = False
    arguments[9] = jnp.full_like(arguments[9], -1)
    assert not attend(shape_of(case, arguments, splits, 48), arguments).any()


def test_ids_outside_the_pool_or_the_table_hide_their_rows():
    case, arguments = small()
    s = shape_of(case, arguments)
    table, selected = np.array(arguments[8]), np.array(arguments[9])
    table[0, 0], table[0, 1], selected[1, :, 0] = s.pool_pages, -1, s.pages * s.page
    hidden = np.array(selected)
    hidden[0][hidden[0] // case.page < 2] = -1
    hidden[1, :, 0] = -1
    got = attend(s, [*arguments[:8], table, selected, arguments[10]])
    want = attend(s, [*arguments[:8], table, hidden, arguments[10]])
    assert (hidden != selected).any()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [32, 19])
def test_a_ring_is_read_in_place(size):
    """As rows side by side, bit by bit; a row of an older or a rejected position is not there."""
    case, arguments = small()
    arguments[4][0, 2:4] = False
    want = attend(shape_of(case, arguments), arguments)
    rows, written = np.asarray(arguments[3].words), arguments[4]
    owners = np.array([3, 1], np.int32)
    ring, tags = np.full((4, size, 132), -1, np.int32), np.full((4, size), -1, np.int32)
    for (b, i), there in np.ndenumerate(written):
        at = case.start - case.window + 1 + i
        ring[owners[b], at % size] = rows[b, i]
        tags[owners[b], at % size] = at if there else at - size
    s = replace(shape_of(case, arguments), ring=size, owners=4)
    stored = [*arguments[:3], WindowRows(jnp.asarray(ring)), tags, *arguments[5:]]
    np.testing.assert_array_equal(attend(s, stored, owners), want)
    hidden = attend(s, stored, np.array([3, 4], np.int32))
    arguments[4][1] = False
    alone = attend(shape_of(case, arguments), arguments)
    np.testing.assert_array_equal(hidden, alone)
    with pytest.raises(ValueError, match=r"self.ring=16 must be at least self.window_rows=17"):
        replace(s, ring=16)


def test_every_code_and_scale_becomes_its_value():
    """One visible row and no sink: the output is the row."""
    case = Case(1, 1, 0, 8, 0, heads=8, window=8, page=8)
    arguments = problem(case, SERVING)
    arguments[0], arguments[10] = jnp.zeros_like(arguments[0]), jnp.full(case.heads, -1e30)
    rng = np.random.default_rng(0)
    codes = np.r_[
        np.arange(127), np.arange(128, 255), 0, 0, np.arange(127), np.arange(128, 255), 1, 1
    ]
    scales = rng.permutation(np.r_[90:102, 150, MAX_SCALE_BYTE - 1, MAX_SCALE_BYTE, 120])
    row = np.concatenate([codes, scales]).astype(np.uint8).view(np.int32)
    window = np.array(arguments[3].words)
    window[0, -1] = row
    arguments[3] = WindowRows(jnp.asarray(window))
    s = shape_of(case, arguments)
    got = attend(s, arguments)[0, 0, 0]
    np.testing.assert_array_equal(got, WindowRows(jnp.asarray(row)).decode(jnp.float32))
    for first in range(0, 127, 32):
        scales = np.minimum(np.arange(first, first + 32), 126)
        row = np.concatenate([rng.permutation(256), scales]).astype(np.uint8).view(np.int32)
        pool = np.array(arguments[7].words)
        pool[0, 3] = row
        arguments[7] = LatentRows(jnp.asarray(pool))
        arguments[4] = np.zeros_like(arguments[4])
        arguments[9] = jnp.full_like(arguments[9], -1).at[0, 0, 5].set(3)
        arguments[8] = jnp.zeros_like(arguments[8])
        got = attend(s, arguments)[0, 0, 0]
        np.testing.assert_array_equal(got, LatentRows(jnp.asarray(row)).decode(jnp.float32))


def test_a_huge_score_moves_the_maximum():
    """Tiles of ascending scores, far above the threshold of a rescaling."""
    case, arguments = small()
    arguments[0] = 200 * arguments[0]
    got = attend(shape_of(case, arguments), arguments)
    want = oracle(arguments, case)
    assert np.isfinite(got).all() and rel_rms(got, want) < 2e-2


def test_blocks_of_a_row():
    rows = (1, 2, 4, 8, 16, 30, 31, 64, 65, 8192)
    counts = [kernel_sm90.shared(n, 640, 64) for n in rows]
    long, short = [(16, 4), (16, 2), (8, 2), (8, 1)], [(4, 1), (4, 1), (2, 1), (2, 1), (1, 1)]
    assert counts == [*long, *short, (1, 1)]
    assert kernel_sm90.shared(1, 128, 64) == (4, 4)
    assert [kernel_sm90.shared(1, 640, n) for n in (8, 16, 32)] == [(8, 1), (16, 1), (16, 2)]


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_a_block_fits_the_gpu(splits):
    s = Attend(1, 1, 64, 128, 512, 64, 64, 64, splits).in_tiles()
    assert s.fits and (s.tiles == 1) == (splits >= 8)
    assert s.share * splits >= 640 and s.tiles * s.tile >= s.share
    assert (
        2 * CONSUMING_REGISTERS + PRODUCING_REGISTERS
    ) * 128 <= 65536 // THREADS // 8 * 8 * THREADS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numerics": REFERENCE}, "must be serving"),
        ({"heads": 12}, "heads=12 must be one of"),
        ({"window_size": 12}, "window_size=12 must be a positive multiple of 8"),
    ],
)
def test_refused_arguments_name_the_value(change, message):
    case = Case(1, 1, 20, 8, 8, heads=change.get("heads", 8), window=16, page=8)
    with pytest.raises(ValueError, match=message):
        kernel_sm90.sparse_attention(
            *problem(case, SERVING),
            window_size=change.get("window_size", 16),
            numerics=change.get("numerics", SERVING),
        )


def test_the_benchmark_compares_with_the_same_function():
    case = Case(2, 2, 150, 24, 20, heads=4)
    q, cos, sin, windows, written, position, floor, pool, tables, *rest = inputs(case, 0)
    assert len(windows) == len(tables) > 1
    arguments = (q, cos, sin, windows[1], written, position, floor, pool, tables[1], *rest)
    got = jax.jit(partial(xla_path, window_size=case.window))(*arguments)
    want = sparse_attention(arguments, case.window, SERVING)
    assert rel_rms(got, want) < BOUNDS["rel"]


def test_auto_on_hopper_takes_the_reference_for_other_shapes(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for name in ("sparse_attention", "ring_attention"):
        monkeypatch.setattr(ref, name, lambda *_, **__: "ref")
        monkeypatch.setattr(kernel_sm90, name, lambda *_, **__: "kernel")
    case = Case(1, 1, 20, 8, 8, heads=8, window=16, page=8)
    q, cos, sin, window, *rest = problem(case, SERVING)
    in_ring = (window, jnp.zeros((1, 16), jnp.int32), jnp.zeros(1, jnp.int32), *rest[1:])
    for build, arguments in ((op.build, (window, *rest)), (op.build_ring, in_ring)):
        run = partial(build("auto"), window_size=16)
        assert run(q, cos, sin, *arguments, numerics=SERVING) == "kernel"
        assert run(q, cos, sin, *arguments, numerics=REFERENCE) == "ref"
        assert run(q[:, :, :3], cos, sin, *arguments, numerics=SERVING) == "ref"
        assert run(q, cos[..., :16], sin, *arguments, numerics=SERVING) == "ref"
