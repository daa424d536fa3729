"""What the launches of the mixing coefficients share: the exact products of ``fn`` and sums of
squares.

``fn`` in float32 is the exact sum of three bf16 numbers, its planes, so products with bf16 are
exact and sums float32.
"""

MIXES = 24
SUMS = MIXES + 1  # of a row: mixes, then squares
STEP = 32  # columns that a thread's 16 bytes of each row of a warp are of: two products deep
WIDTH = 4096  # K is a multiple
LOG2E = 1.4426950408889634


def check(k: int, iters: int) -> None:
    if k % WIDTH or not k > 0:
        raise ValueError(f"self.{k=} must be a multiple of {WIDTH}")
    if iters < 1:
        raise ValueError(f"self.{iters=} must be positive")


def split(pairs: int) -> list[str]:
    """w: pairs of f as bf16, what that leaves as bf16, and what that leaves; clobbers f, lo, hi."""
    lines = []
    for pair in range(pairs):
        low, high = (f"f{2 * pair + e}" for e in range(2))
        for part in range(3):
            out = f"w{pairs * part + pair}"
            lines.append(f"cvt.rn.bf16x2.f32 {out}, {high}, {low};")
            if part < 2:
                lines += [
                    f"shl.b32 lo, {out}, 16; and.b32 hi, {out}, 0xFFFF0000;",
                    f"sub.f32 {low}, {low}, lo; sub.f32 {high}, {high}, hi;",
                ]
    return lines


def squares(word: str, total: str) -> list[str]:
    """Adds those of a word's two bf16; clobbers lo and hi."""
    return [
        f"shl.b32 lo, {word}, 16; and.b32 hi, {word}, 0xFFFF0000;",
        f"fma.rn.f32 {total}, lo, lo, {total}; fma.rn.f32 {total}, hi, hi, {total};",
    ]


def add_quads(total: str) -> list[str]:
    """The sum of four neighbouring lanes, in each; clobbers t."""
    return [
        f"shfl.sync.bfly.b32 t, {total}, {step}, 31, 0xffffffff; add.f32 {total}, {total}, t;"
        for step in (1, 2)
    ]
