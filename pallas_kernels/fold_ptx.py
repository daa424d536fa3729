"""Sums of several values over the lanes of a warp (PTX)."""


def fold(values: list[str]) -> list[str]:
    """The first of up to 32 ``values``: the warp's sum of the value whose number is the lane's.
    Each step halves the values of a lane. Every sum adds lanes in the same order. Clobbers all
    values, the 32-bit registers a, t, lo, hi and predicate p.
    """
    assert len(values) <= 32
    lines, count = ["mov.b32 t, 0;"], len(values)
    for half in (16, 8, 4, 2, 1):
        lines.append(f"and.b32 a, lane, {half}; setp.ne.u32 p, a, 0;")
        for i in range(min(half, count)):
            other = values[i + half] if i + half < count else "t"
            lines += [
                f"selp.b32 lo, {values[i]}, {other}, p; selp.b32 hi, {other}, {values[i]}, p;",
                f"shfl.sync.bfly.b32 lo, lo, {half}, 31, 0xffffffff; add.f32 {values[i]}, hi, lo;",
            ]
        count = min(half, count)
    return lines
