"""The all-reduce between GPUs of one host as PTX: stores to peers' memory, and a bounded poll.

The data say themselves that they have arrived: a word of a slot is the sentinel until then. So
there is no flag, fence or barrier. A rank begins call i + 2 only behind call i + 1, which needs
what every peer sends behind its call i; therefore what call i clears is clear before anyone writes
to it again, and what it reads stays until it has ended.
"""

from collections.abc import Iterator, Sequence

from pallas_kernels.all_reduce.exchange import SENTINEL, SLOTS, THREADS, Exchange

POLLS = 1024  # between two looks at the clock
NAN = 0x7FFF7FFF  # two bf16: the result of a call that got no answer

VALUES = ("a0", "a1", "a2", "a3")  # a thread's vector


def vector(names: Sequence[str]) -> str:
    return "{" + ",".join(names) + "}"


def parts(sender: int) -> list[str]:
    """A vector of the sender."""
    return [f"part{4 * sender + i}" for i in range(4)]


def registers(e: Exchange) -> list[str]:
    return [
        f".reg .b32 rank,polls,word,sentinel,zero,low,high,half,part<{4 * e.ranks}>;",
        f".reg .b64 offset,mine,home,fault,now,end,peer<{e.ranks}>;",
        f".reg .pred miss,late,own<{e.ranks}>,lost<{e.ranks}>;",
    ]


def one_shot(e: Exchange, slot: int, values: Sequence[str], table: str) -> list[str]:
    """Registers ``values``, a vector ``offset`` bytes into the array, become its sum over ranks."""
    old, size = (slot + 2) % SLOTS, e.ranks * e.part
    return [
        *meet(e, table),
        f"mul.wide.u32 mine, rank, {e.part}; add.s64 mine, mine, offset;",
        *_no_sentinel(values),
        *_send(e, slot * size, values),
        *clear(e, old * size, e.part),
        *(f"@own{j} mov.b32 {p}, {v};" for j in each(e) for p, v in pairs(j, values)),
        *wait(e, "ARRIVE", slot * size, e.part),
        *_add(e, values),
        "bra SUMMED;",
        "ARRIVE_LATE:",
        *(f"mov.b32 {v}, {NAN};" for v in values),
        "SUMMED:",
    ]


def program(e: Exchange, slot: int) -> list[str]:
    """Operands: x, the table of this rank, the sum (GMEM), block."""
    lines = [*registers(e), ".reg .b32 tid,index,a<4>; .reg .b64 in,out; .reg .pred none;"]
    lines += ["mov.u32 tid, %tid.x; mov.b32 index, $3;"]
    lines += [f"shl.b32 index, index, {THREADS.bit_length() - 1}; add.u32 index, index, tid;"]
    lines += [f"setp.ge.u32 none, index, {e.vectors}; @none bra END;"]
    lines += ["mul.wide.u32 offset, index, 16; mov.b64 in, $0; add.s64 in, in, offset;"]
    lines += ["mov.b64 out, $2; add.s64 out, out, offset;"]
    if e.two_shot:
        lines += _two_shot(e, slot)
    else:
        lines += [f"ld.global.v4.b32 {vector(VALUES)}, [in];"]
        lines += one_shot(e, slot, VALUES, "$1")
        lines += [f"st.global.v4.b32 [out], {vector(VALUES)};"]
    return split([*lines, "END:"])


def report_program(e: Exchange) -> list[str]:
    """Operands: the table of this rank, its error word (GMEM). One thread copies it."""
    lines = [*registers(e), ".reg .b32 tid; .reg .b64 out; .reg .pred none;"]
    lines += ["mov.u32 tid, %tid.x; setp.ne.u32 none, tid, 0; @none bra END;"]
    lines += ["mov.b64 offset, 0; mov.b64 out, $1;", *meet(e, "$0")]
    return split(
        [*lines, "ld.volatile.global.b32 word, [fault]; st.global.b32 [out], word;", "END:"]
    )


def _two_shot(e: Exchange, slot: int) -> list[str]:
    """A thread has a vector of every rank's part, and sums those of its own."""
    old, size = (slot + 2) % SLOTS, e.ranks * e.part
    sums, old_sums = e.sums + slot * e.nbytes, e.sums + old * e.nbytes
    lines = [f"ld.global.v4.b32 {vector(parts(j))}, [in+{j * e.part}];" for j in each(e)]
    lines += [*meet(e, "$1"), f"mul.wide.u32 mine, rank, {e.part}; add.s64 mine, mine, offset;"]
    for j in each(e):
        lines += _no_sentinel(parts(j))
    lines += _send(e, slot * size, None)
    lines += [*clear(e, old * size, e.part), *clear(e, old_sums, e.part)]
    lines += wait(e, "ARRIVE", slot * size, e.part)
    lines += [*_add(e, VALUES), "bra SUMMED;", "ARRIVE_LATE:"]
    lines += [*(f"mov.b32 {v}, {NAN};" for v in VALUES), "SUMMED:", *_no_sentinel(VALUES)]
    for j in each(e):
        lines += [f"@!own{j} st.volatile.global.v4.b32 [peer{j}+{sums}], {vector(VALUES)};"]
        lines += [f"@own{j} mov.b32 {p}, {v};" for p, v in pairs(j, VALUES)]
    lines += [*wait(e, "RETURN", sums, e.part), "bra RETURNED;", "RETURN_LATE:"]
    lines += [*(f"mov.b32 {p}, {NAN};" for j in each(e) for p in parts(j)), "RETURNED:"]
    return lines + [f"st.global.v4.b32 [out+{j * e.part}], {vector(parts(j))};" for j in each(e)]


def each(e: Exchange) -> range:
    return range(e.ranks)


def pairs(sender: int, values: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(parts(sender), values, strict=True)


def split(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in text.strip().splitlines()]


def meet(e: Exchange, table: str) -> list[str]:
    """``home``: this thread's place in its own memory, ``peer<N>``: the memory of all ranks."""
    lines = [f"mov.b32 sentinel, {SENTINEL}; mov.b32 zero, 0;"]
    lines += [f"ld.global.nc.b64 peer{j}, [{table}+{8 * j}];" for j in each(e)]
    lines += [f"ld.global.nc.b32 rank, [{table}+{8 * e.ranks}];"]
    for j in each(e):
        lines += [f"setp.eq.u32 own{j}, rank, {j}; @own{j} mov.b64 home, peer{j};"]
    return [*lines, f"add.s64 fault, home, {e.fault}; add.s64 home, home, offset;"]


def _no_sentinel(values: Sequence[str]) -> list[str]:
    """-0.0 + 0.0 is 0.0: no half of a word is that of the sentinel."""
    return [f"add.rn.bf16x2 {v}, {v}, zero;" for v in values]


def _send(e: Exchange, at: int, values: Sequence[str] | None) -> list[str]:
    """A vector to every peer, that of the peer's part if ``values`` is None; ``peer<N>`` becomes
    this thread's place there.
    """
    lines = [f"add.s64 peer{j}, peer{j}, mine;" for j in each(e)]
    return lines + [
        f"@!own{j} st.volatile.global.v4.b32 [peer{j}+{at}], {vector(values or parts(j))};"
        for j in each(e)
    ]


def clear(e: Exchange, at: int, stride: int) -> list[str]:
    nothing = vector(["sentinel"] * 4)
    return [
        f"@!own{j} st.volatile.global.v4.b32 [home+{at + j * stride}], {nothing};" for j in each(e)
    ]


def wait(e: Exchange, label: str, at: int, stride: int) -> list[str]:
    """The vectors of all peers, or a jump to ``<label>_LATE`` with the error word set; what the
    rank itself sent is in its registers already.
    """
    lines = ["mov.b32 polls, 0;", f"{label}:"]
    lines += [
        f"@!own{j} ld.volatile.global.v4.b32 {vector(parts(j))}, [home+{at + j * stride}];"
        for j in each(e)
    ]
    for j in each(e):
        first, *others = parts(j)
        lines += [f"setp.eq.b32 lost{j}, {first}, sentinel;"]
        lines += [f"setp.eq.or.b32 lost{j}, {other}, sentinel, lost{j};" for other in others]
    lines += ["or.pred miss, lost0, lost1;"]
    lines += [f"or.pred miss, miss, lost{j};" for j in range(2, e.ranks)]
    return [
        *lines,
        f"@!miss bra {label}_DONE;",
        f"add.u32 polls, polls, 1; and.b32 word, polls, {POLLS - 1};",
        f"setp.ne.u32 late, word, 0; @late bra {label};",
        f"mov.u64 now, %globaltimer; setp.eq.u32 late, polls, {POLLS};",
        f"@late add.s64 end, now, {round(1e9 * e.timeout_s)};",
        "ld.volatile.global.b32 word, [fault];",
        "setp.lt.s64 late, now, end; setp.eq.and.b32 late, word, 0, late;",
        f"@late bra {label};",
        f"setp.ne.u32 late, word, 0; @late bra {label}_LATE;",
        *(f"@lost{j} mov.b32 word, {j + 1};" for j in each(e)),
        f"st.volatile.global.b32 [fault], word; bra {label}_LATE;",
        f"{label}_DONE:",
    ]


def _add(e: Exchange, values: Sequence[str]) -> list[str]:
    """In float32 and the order of the ranks, so that all of them get the same bits."""
    lines = []
    for i, value in enumerate(values):
        first, *others = (parts(j)[i] for j in each(e))
        lines += [f"shl.b32 low, {first}, 16; and.b32 high, {first}, 0xFFFF0000;"]
        for other in others:
            lines += [f"shl.b32 half, {other}, 16; add.f32 low, low, half;"]
            lines += [f"and.b32 half, {other}, 0xFFFF0000; add.f32 high, high, half;"]
        lines += [f"cvt.rn.bf16x2.f32 {value}, high, low;"]
    return lines
