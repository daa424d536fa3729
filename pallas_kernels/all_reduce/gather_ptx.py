"""The gather between GPUs of one host as PTX, with the stores and the bounded poll of the sum.

It has two halves of memory instead of three slots: a thread clears what it has read itself, and
peers write there again only behind the call that follows, which needs what this rank sends behind
this one.
"""

from pallas_kernels.all_reduce.exchange import SENTINEL, THREADS, VECTOR_BYTES, Gather
from pallas_kernels.all_reduce.exchange_ptx import (
    NAN,
    VALUES,
    clear,
    each,
    meet,
    pairs,
    parts,
    registers,
    split,
    vector,
    wait,
)


def program(g: Gather, half: int) -> list[str]:
    """Operands: x, the table of this rank, the result (GMEM), block.

    A thread sends all of its vectors before it waits for the first of its peers'.
    """
    e = g.exchange
    at = e.gathers + half * e.ranks * e.room
    again = [
        f"add.u32 index, index, {g.grid * THREADS};",
        f"setp.lt.u32 more, index, {g.vectors};",
    ]
    lines = [
        *registers(e),
        ".reg .b32 tid,index,start,row,column,a<4>; .reg .b64 in,out,place,memory;",
        ".reg .pred none,more;",
        "mov.u32 tid, %tid.x; mov.b32 index, $3;",
        f"shl.b32 index, index, {THREADS.bit_length() - 1}; add.u32 index, index, tid;",
        f"setp.ge.u32 none, index, {g.vectors}; @none bra END;",
        "mov.b32 start, index;",
        *_load(),  # on its way while the table is read
        "mov.b64 offset, 0;",
        *meet(e, "$1"),
        f"mov.b64 memory, home; mul.wide.u32 mine, rank, {e.room};",
        *(f"add.s64 peer{j}, peer{j}, mine;" for j in each(e)),
        f"mul.wide.u32 offset, index, {VECTOR_BYTES}; bra LOADED;",
        "SEND:",
        *_load(),
        "LOADED:",
        *_no_sentinel(),
    ]
    for j in each(e):
        lines += [f"add.s64 place, peer{j}, offset;"]
        lines += [f"@!own{j} st.volatile.global.v4.b32 [place+{at}], {vector(VALUES)};"]
    lines += [*again, "@more bra SEND;", "mov.b32 index, start;", "RECEIVE:"]
    lines += [*_load(), *_no_sentinel()]
    lines += ["add.s64 home, memory, offset;"]
    lines += [f"@own{j} mov.b32 {p}, {v};" for j in each(e) for p, v in pairs(j, VALUES)]
    lines += [*wait(e, "ARRIVE", at, e.room), "bra ARRIVED;", "ARRIVE_LATE:"]
    lines += [f"mov.b32 {p}, {NAN};" for j in each(e) for p in parts(j)]
    lines += ["ARRIVED:", *clear(e, at, e.room), *_store(g), *again, "@more bra RECEIVE;", "END:"]
    return split(lines)


def _load() -> list[str]:
    """A vector of this rank; ``offset``: where it lies."""
    return [
        f"mul.wide.u32 offset, index, {VECTOR_BYTES}; mov.b64 in, $0; add.s64 in, in, offset;",
        f"ld.global.v4.b32 {vector(VALUES)}, [in];",
    ]


def _no_sentinel() -> list[str]:
    return [f"setp.eq.b32 more, {v}, {SENTINEL}; @more mov.b32 {v}, 0;" for v in VALUES]


def _store(g: Gather) -> list[str]:
    e = g.exchange
    if g.union:
        lines = [
            f"or.b32 {first}, {first}, {other};"
            for j in range(1, e.ranks)
            for first, other in zip(parts(0), parts(j), strict=True)
        ]
        return [
            *lines,
            "mov.b64 out, $2; add.s64 out, out, offset;",
            f"st.global.v4.b32 [out], {vector(parts(0))};",
        ]
    across = g.nbytes // VECTOR_BYTES
    return [
        f"div.u32 row, index, {across}; mul.lo.u32 column, row, {across};",
        "sub.u32 column, index, column;",
        f"mul.wide.u32 out, row, {g.result}; mul.wide.u32 place, column, {VECTOR_BYTES};",
        "add.s64 out, out, place; mov.b64 place, $2; add.s64 out, out, place;",
        *(f"st.global.v4.b32 [out+{j * g.nbytes}], {vector(parts(j))};" for j in each(e)),
    ]
