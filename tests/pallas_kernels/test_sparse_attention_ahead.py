"""Arrays that a launch asks into L2: every whole piece once, and no bit of a result changes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.numerics import SERVING
from pallas_kernels.sparse_attention import kernel_sm90, op
from pallas_kernels.sparse_attention.ahead import MOST, PIECE, ask, pieces
from pallas_kernels.sparse_attention.attend_ptx import NAMES, arrays
from pallas_kernels.sparse_attention.attend_shape import Attend
from pallas_kernels.sparse_attention.cases import Case
from tests.pallas_kernels import ptx_machine as pm
from tests.pallas_kernels.test_sparse_attention import problem
from tests.pallas_kernels.test_sparse_attention_kernel import Machine, attend, shape_of

PREFETCH = "cp.async.bulk.prefetch.L2.global"


class Asking(pm.Cluster):
    """Notes where each array of ``of``, numbers of operands, was asked for: (which, offset)."""

    def __init__(self, *arguments, of: range, asked: list, **options):
        super().__init__(*arguments, **options)
        self.of, self.asked = of, asked

    def execute(self, b, opcode, args, active):
        if opcode == PREFETCH:
            assert args[1] == str(PIECE)
            bases = [b.operands[i] for i in self.of]
            for address in b.read(args[0].strip("[]"))[active].astype(int):
                which = int(np.searchsorted(bases, address, side="right")) - 1
                self.asked.append((which, address - bases[which]))
        else:
            super().execute(b, opcode, args, active)


class AskingAttention(Asking, Machine):
    pass


def all_pieces(counts) -> list[tuple[int, int]]:
    return [(i, PIECE * n) for i, count in enumerate(counts) for n in range(count)]


def shapes(*sizes: int) -> list:
    return [jax.ShapeDtypeStruct((size // 2, 1), jnp.bfloat16) for size in sizes]


def test_whole_pieces_up_to_the_most():
    assert pieces(shapes(4 * PIECE, 3 * PIECE - 2, PIECE - 2)) == (4, 2, 0)
    last = shapes(MOST - PIECE, 3 * PIECE, 3 * PIECE)
    assert pieces(last) == (MOST // PIECE - 1, 1, 0)
    assert pieces(shapes(2 * MOST, PIECE)) == (MOST // PIECE, 0)
    assert pieces(()) == ()


@pytest.mark.parametrize(
    ("counts", "blocks"),
    [
        ((1,), 3),
        ((64,), 1),
        ((500,), 2),
        ((64, 7), 1),  # the second begins with the first thread again
        ((128, 1, 130), 2),
        ((5, 3, 40), 1),
        ((70, 200, 9), 2),
        ((0, 65, 0), 1),
    ],
    ids=str,
)
def test_every_piece_is_asked_for_once(counts, blocks):
    bases = [f"base{i}" for i in range(len(counts))]
    n = len(counts)
    lines = [
        f".reg .b64 d,{','.join(bases)}; .reg .b32 index,at; .reg .pred p;",
        *[f"mov.b64 {base}, ${i};" for i, base in enumerate(bases)],
        f"mov.u32 index, %tid.x; mad.lo.u32 index, ${n}, 64, index;",
        *ask(counts, bases, "index", 64 * blocks, "at", "d", "p"),
    ]
    places = [(1 << 33) * (i + 1) for i in range(n)]  # more than 32 bits
    asked: list = []
    Asking(
        lines, pm.Memory(512), threads=64, shared=0, blocks=blocks,
        operands=lambda rank: [*places, rank], of=range(n), asked=asked,
    ).run()  # fmt: skip
    assert sorted(asked) == all_pieces(counts)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (Case(1, 2, 20, 24, 13, heads=8, window=16, page=8), 48),
        (Case(1, 1, 100, 0, 0, heads=8, window=128), 48),
    ],
    ids=["one tile", "two tiles"],
)
def test_attention_asks_for_whole_pieces_once(case, tile):
    arguments = problem(case, SERVING)
    ahead = [np.zeros((700, 1024), np.uint8), np.zeros((11, 500), np.int32)]
    counts = pieces([jnp.asarray(array) for array in ahead])
    assert counts == (175, 5)
    s = shape_of(case, arguments, 2, tile)
    assert s.tiles == (1 if case.selected else 2)
    asking, asked = replace(s, ahead=counts), []
    first = arrays(asking).index("ahead0")
    machine = partial(AskingAttention, of=range(first, first + 2), asked=asked)
    got = attend(asking, arguments, machine=machine, ahead=ahead)
    np.testing.assert_array_equal(got, attend(s, arguments))
    assert sorted(asked) == all_pieces(counts)


def test_one_block_a_row_asks_for_nothing():
    with pytest.raises(ValueError, match=r"self.ahead=\(3,\) must be empty where self.splits=1"):
        Attend(1, 1, 8, 16, 8, 1, 8, 1, ahead=(3,))


@pytest.fixture(scope="module")
def weights() -> list:
    """Of two pieces, of less than one, of one and some more."""
    return [
        jnp.zeros((2, PIECE), jnp.float8_e4m3fn),
        jnp.zeros(PIECE - 1, jnp.uint8),
        jnp.zeros((3, 601), jnp.int32),
    ]


def in_rings(case: Case) -> list:
    q, cos, sin, window, _, position, floor, *rest = problem(case, SERVING)
    tags = jnp.zeros(window.words.shape[:2], jnp.int32)
    slot = jnp.zeros(case.requests, jnp.int32)
    return [q, cos, sin, window, tags, slot, position, floor, *rest]


@pytest.mark.parametrize(("rows", "taken"), [(2, (0, 2)), (65, ())])
def test_attention_takes_arrays_where_rows_are_few(monkeypatch, weights, rows, taken):
    """As they are, without those of which no piece is asked for."""
    launches, got = [], []

    def launcher(s):
        launches.append(s)
        return lambda q, *rest: got.extend(rest) or q

    monkeypatch.setattr(kernel_sm90, "launcher", launcher)
    case = Case(rows, 1, 20, 56, 13, heads=8, window=16, page=8)
    kernel_sm90.ring_attention(
        *in_rings(case), window_size=case.window, numerics=SERVING, ahead=weights
    )
    assert launches[0].ahead == tuple((2, 0, 1)[i] for i in taken)
    inputs = len(NAMES) - 2  # behind the queries, without the output
    assert all(a is weights[i] for a, i in zip(got[inputs:], taken, strict=True))


def test_auto_hands_arrays_on_and_the_reference_ignores_them(monkeypatch, weights):
    case = Case(1, 1, 20, 8, 8, heads=8, window=16, page=8)
    arguments, options = in_rings(case), {"window_size": case.window, "numerics": SERVING}
    programs = [
        jax.make_jaxpr(partial(op.build_ring("reference"), **options, ahead=ahead))(*arguments)
        for ahead in ((), weights)
    ]
    assert str(programs[0]) == str(programs[1])
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "ring_attention", lambda *_, ahead, **__: ahead)
    assert op.build_ring("auto")(*arguments, **options, ahead=weights) is weights
