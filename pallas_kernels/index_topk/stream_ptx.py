"""A launch of the selection kernel and its loops over a row's scores, as PTX."""

from dataclasses import dataclass

BINS = 2048
LEVELS = 4
SAMPLE = 4  # loads a thread
BLOCKS = (1, 2, 4, 8, 16)  # scores of a block
PICKED_BITS = 12  # of a packed pair of counts, the picks above the k-th key


@dataclass(frozen=True)
class Selection:
    """A launch: ``k`` of the ``n`` scores of a row, or of its blocks of ``block`` > 1 scores."""

    n: int
    k: int
    block: int = 1
    cluster: int = 8
    warpgroups: int = 4
    kept: int = 4096  # keys that a block of threads can hold
    unroll: int = 4  # loads in flight a thread

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"{self.block=} must be 1, 2, 4, 8 or 16")
        if not 0 < self.k < 1 << PICKED_BITS:
            raise ValueError(f"{self.k=} must be between 1 and {(1 << PICKED_BITS) - 1}")
        if not 0 < self.elements <= 1 << 21:
            raise ValueError(f"{self.n=} must be between 1 and {self.block << 21}")

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def elements(self) -> int:
        return -(-self.n // self.block)

    @property
    def vector(self) -> int:
        """Scores a load reads."""
        return 4 if self.n % 4 == 0 and self.block != 2 else 1

    @property
    def map_words(self) -> int:
        """Words of a map, a whole number a thread."""
        chunk = -(-self.elements // (128 * self.cluster)) * 128
        return -(-chunk // (32 * self.threads)) * self.threads

    # Places in shared memory, in words, behind the counts of the levels.
    @property
    def above(self) -> int:
        return LEVELS * BINS

    @property
    def equal(self) -> int:
        return self.above + self.map_words

    @property
    def keys(self) -> int:
        return self.equal + self.map_words

    @property
    def words(self) -> int:
        return self.keys + 2 * self.kept + 64

    @property
    def found(self) -> int:
        """Then: places left, keys kept, picks of this block, 16 sums of warps from + 16 on."""
        return self.keys + 2 * self.kept


def _key(register: str, score: str) -> list[str]:
    """The key of a score, -0.0 as 0.0."""
    return [
        f"add.f32 {score}, {score}, 0f00000000; shr.s32 a, {score}, 31;",
        f"or.b32 a, a, 0x80000000; xor.b32 {register}, {score}, a;",
    ]


def stream(s: Selection, body: list[str], name: str) -> list[str]:
    """``body`` over this block's share of the row; ``name``, and ``#`` in a body, make labels
    unique.
    """
    return _stream_entries(s, body, name) if s.block == 1 else _stream_blocks(s, body, name)


def sample(s: Selection, body: list[str]) -> list[str]:
    """``body`` over ``SAMPLE`` loads a thread, spread over the share and none twice; over all of it
    if that is less.
    """
    width = 4 if s.block == 1 else 1
    lines = [
        f"shr.u32 d, cnt, {SAMPLE.bit_length() - 1}; and.b32 d, d, 0xFFFFFFE0;",
        f"max.u32 d, d, {width * s.threads}; mul.lo.u32 idx, tid, {width};",
    ]
    for u in range(SAMPLE):
        lines += [f"mul.wide.u32 q64, idx, {4 * s.block}; add.s64 p64, rowp, q64;"]
        if s.block == 1:
            lines += [*_guarded(s, 4 * u), "add.u32 idx, idx, d;"]
        else:
            lines += [*_block_key(s), *_renamed(body, f"SAMPLE{u}"), "add.u32 idx, idx, d;"]
    if s.block == 1:
        lines += ["mul.lo.u32 idx, tid, 4;"]
        for u in range(SAMPLE):
            lines += [*_valid(), *_keys(4 * u, True), *_renamed(body, f"SAMPLE{u}")]
            lines += ["add.u32 idx, idx, d;"]
    return lines


def prefetch(s: Selection) -> list[str]:
    """The share of the row on its way to L2."""
    if s.n % 4:
        return []
    warps = s.threads // 32
    return [
        f"mul.lo.u32 a, lo, {s.block}; sub.u32 a, vis, a; mul.lo.u32 b, cnt, {s.block};",
        "min.u32 a, a, b; shl.b32 a, a, 2; and.b32 a, a, 0xFFFFFFF0;",
        f"add.u32 c, a, {16 * warps - 1}; div.u32 c, c, {16 * warps}; shl.b32 c, c, 4;",
        "mul.lo.u32 b, c, warp; setp.lt.u32 p, b, a; setp.eq.and.u32 p, lane, 0, p;",
        "sub.u32 a, a, b; min.u32 a, a, c; cvt.u64.u32 q64, b; add.s64 q64, q64, rowp;",
        "@p cp.async.bulk.prefetch.L2.global [q64], a;",
    ]


def _load(s: Selection, first: int, offset: int, guarded: bool) -> list[str]:
    """Four scores to x<first> ...; ``guarded``: those that v0 .. v3 allow."""
    if s.vector == 4:
        names = ",".join(f"x{first + e}" for e in range(4))
        return [f"{'@v0 ' if guarded else ''}ld.global.v4.b32 {{{names}}}, [p64+{offset}];"]
    guards = [f"@v{e} " if guarded else "" for e in range(4)]
    return [
        f"{guard}ld.global.b32 x{first + e}, [p64+{offset + 4 * e}];"
        for e, guard in enumerate(guards)
    ]


def _keys(first: int, guarded: bool) -> list[str]:
    """key0 .. key3 of four scores, 0 where v0 .. v3 forbid."""
    lines = [line for e in range(4) for line in _key(f"key{e}", f"x{first + e}")]
    if guarded:
        lines += [f"selp.b32 key{e}, key{e}, 0, v{e};" for e in range(4)]
    return lines


def _valid() -> list[str]:
    return [f"add.u32 a, idx, {e}; setp.lt.u32 v{e}, a, cnt;" for e in range(4)]


def _guarded(s: Selection, first: int) -> list[str]:
    """The scores of the elements idx .. idx + 3 that are there."""
    clear = [f"mov.b32 x{first + e}, 0;" for e in range(4)]
    return [*_valid(), *clear, *_load(s, first, 0, True)]


def _stream_entries(s: Selection, body: list[str], name: str) -> list[str]:
    """``body`` with keys key0 .. key3 of the elements idx .. idx + 3 of this block's share."""
    group = 4 * s.threads
    tile = s.unroll * group
    lines = [
        f"shr.u32 full, cnt, {tile.bit_length() - 1}; mov.b32 i, 0; shl.b32 idx, tid, 2;",
        "mul.wide.u32 q64, tid, 16; add.s64 p64, rowp, q64;",
        f"setp.eq.u32 p, full, 0; @p bra TAIL_{name};",
        f"TILE_{name}:",
    ]
    for u in range(s.unroll):
        lines += _load(s, 4 * u, 16 * s.threads * u, False)
    for u in range(s.unroll):
        lines += [*_keys(4 * u, False), *_renamed(body, f"{name}{u}")]
        lines += [f"add.u32 idx, idx, {group};"]
    return [
        *lines,
        f"add.s64 p64, p64, {4 * tile}; add.u32 i, i, 1; setp.lt.u32 p, i, full;",
        f"@p bra TILE_{name};",
        f"TAIL_{name}: shl.b32 i, full, {tile.bit_length() - 1};",
        f"REST_{name}: setp.ge.u32 p, i, cnt; @p bra END_{name};",
        *_guarded(s, 0),
        *_keys(0, True),
        *_renamed(body, f"{name}R"),
        f"add.u32 idx, idx, {group}; add.u32 i, i, {group}; add.s64 p64, p64, {16 * s.threads};",
        f"bra REST_{name};",
        f"END_{name}:",
    ]


def _block_key(s: Selection) -> list[str]:
    """key0 of element idx, a block of scores at p64."""
    lines = [
        f"add.u32 pos, lo, idx; mul.lo.u32 a, pos, {s.block}; sub.u32 left, vis, a;",
        "setp.lt.u32 v0, idx, cnt; selp.b32 left, left, 0, v0;",
        *[f"mov.b32 x{e}, 0xFF800000;" for e in range(s.block)],
    ]
    for e in range(0, s.block, s.vector):
        names = ",".join(f"x{e + w}" for w in range(s.vector))
        load = f"ld.global.v4.b32 {{{names}}}" if s.vector == 4 else f"ld.global.b32 {names}"
        lines.append(f"setp.gt.u32 p, left, {e}; @p {load}, [p64+{4 * e}];")
    lines += [
        f"setp.gt.u32 p, left, {e}; selp.b32 x{e}, x{e}, 0xFF800000, p;" for e in range(s.block)
    ]
    return [
        *lines,
        *[f"max.f32 x0, x0, x{e};" for e in range(1, s.block)],
        # The block of the newest entry wins, a block without a score is no candidate.
        f"setp.le.u32 p, left, {s.block}; @p setp.ne.u32 p, left, 0; @p mov.b32 x0, 0x7F800000;",
        "setp.eq.u32 p, x0, 0xFF800000;",
        *_key("key0", "x0"),
        "selp.b32 key0, 0, key0, p;",
    ]


def _stream_blocks(s: Selection, body: list[str], name: str) -> list[str]:
    """``body`` with key0 of the elements idx, idx + threads, ..."""
    return [
        f"mov.b32 i, 0; mov.b32 idx, tid; mul.wide.u32 q64, tid, {4 * s.block};",
        "add.s64 p64, rowp, q64;",
        f"LOOP_{name}: setp.ge.u32 p, i, cnt; @p bra END_{name};",
        *_block_key(s),
        *_renamed(body, f"{name}B"),
        f"add.u32 idx, idx, {s.threads}; add.u32 i, i, {s.threads};",
        f"add.s64 p64, p64, {4 * s.block * s.threads}; bra LOOP_{name};",
        f"END_{name}:",
    ]


def _renamed(body: list[str], name: str) -> list[str]:
    return [line.replace("#", name) for line in body]
