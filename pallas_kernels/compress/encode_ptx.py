"""Rounding of 16 values a thread to FP4 and FP8 codes with their scales, and their stores
(ARCHITECTURE 0.1 and 4.7), as PTX.

FP4: the values over the scale are scaled so that subnormal float16 numbers fall on E2M1's subnormal
ones; float16 bits rounded to one bit of mantissa, ties to even, are then the codes. float16 keeps
what decides: a bf16 value over a scale of four bits is a midpoint exactly, or at least 2^-8 of it
away.
"""

from pallas_kernels.compress.store_shape import KEYS, LATENTS, VALUES, Job
from pallas_kernels.inline_ptx import f32


def store(job: Job, at: dict[str, str]) -> list[str]:
    """Codes and scales of x0 .. x15 to the row ``place``, where ``write``."""
    if job.kind == LATENTS:
        return [*_latent_scale(), *_fp4(), *_latent_store(at)]
    if job.kind == KEYS:
        return [*_power_scale(6 * 2.0**-126, 6, 2.0**-14), *_fp4(), *_key_store(job, at)]
    return [*_power_scale(1e-4, 448, 1.0), *_fp8(), *_window_store(job, at)]


def _amax(floor: float) -> list[str]:
    lines = [f"mov.b32 amax, {f32(floor)};"]
    for i in range(VALUES):
        lines.append(f"abs.f32 a, x{i}; max.f32 amax, amax, a;")
    return lines


def _latent_scale() -> list[str]:
    """byte: E4M3 scale of the 16 values, r: 2^-14 over it."""
    return [
        *_amax(6 * 2.0**-9),
        f"div.rn.f32 s, amax, {f32(6.0)}; cvt.rn.satfinite.e4m3x2.f32 k0, {f32(0.0)}, s;",
        # E4M3 bits at float32's exponent are 2^-120 of the value.
        f"cvt.u32.u16 byte, k0; shl.b32 s, byte, 20; mul.rn.f32 s, s, {f32(2.0**120)};",
        f"rcp.rn.f32 r, s; mul.rn.f32 r, r, {f32(2.0**-14)};",
    ]


def _power_scale(floor: float, largest: float, factor: float) -> list[str]:
    """byte: UE8M0 scale of the 32 values of two threads, r: ``factor`` over it."""
    return [
        *_amax(floor),
        "shfl.sync.bfly.b32 a, amax, 1, 31, 0xffffffff; max.f32 amax, amax, a;",
        f"mul.rn.f32 byte, amax, {f32(1 / largest)};",
        "add.u32 byte, byte, 0x7FFFFF; shr.u32 byte, byte, 23;",
        f"sub.u32 r, 254, byte; shl.b32 r, r, 23; mul.rn.f32 r, r, {f32(factor)};",
    ]


def _fp4() -> list[str]:
    """w0, w1: sixteen codes of x0 .. x15 times r, the first in the lowest bits."""
    lines = ["mov.b32 d, 0x0E000E00;"]  # two codes of 6
    for i in range(VALUES // 2):
        lines += [
            f"mul.rn.f32 a, x{2 * i}, r; mul.rn.f32 b, x{2 * i + 1}, r;",
            "cvt.rn.f16x2.f32 c, b, a; and.b32 a, c, 0x7FFF7FFF; min.u16x2 a, a, d;",
            "shr.u32 b, a, 9; and.b32 b, b, 0x00010001; add.u32 a, a, b;",
            "add.u32 a, a, 0x00FF00FF; shr.u32 a, a, 9; and.b32 a, a, 0x00070007;",
            f"shr.u32 c, c, 12; and.b32 c, c, 0x00080008; or.b32 y{i}, a, c;",
        ]
    for i in range(0, 8, 2):
        lines += [
            f"shl.b32 a, y{i + 1}, 8; or.b32 a, a, y{i}; shr.u32 b, a, 12; or.b32 y{i}, a, b;"
        ]
    return [*lines, "prmt.b32 w0, y0, y2, 0x5410;", "prmt.b32 w1, y4, y6, 0x5410;"]


def _fp8() -> list[str]:
    """w0 .. w3: sixteen E4M3 codes of x0 .. x15 times r."""
    lines = []
    for i in range(0, VALUES, 4):
        lines += [f"mul.rn.f32 y{e}, x{i + e}, r;" for e in range(4)]
        lines += [
            "cvt.rn.satfinite.e4m3x2.f32 k0, y1, y0; cvt.rn.satfinite.e4m3x2.f32 k1, y3, y2;",
            f"mov.b32 w{i // 4}, {{k0,k1}};",
        ]
    return lines


def _latent_store(at: dict[str, str]) -> list[str]:
    """256 bytes of codes, then 32 of scales."""
    return [
        f"mul.wide.u32 q64, place, 288; add.s64 base, {at['pool']}, q64;",
        "mul.wide.u32 q64, part, 8; add.s64 p64, base, q64;",
        "@write st.global.v2.b32 [p64], {w0,w1};",
        "cvt.u64.u32 q64, part; add.s64 p64, base, q64; @write st.global.u8 [p64+256], byte;",
    ]


def _key_store(job: Job, at: dict[str, str]) -> list[str]:
    return [
        f"mul.wide.u32 q64, place, {job.width // 2}; add.s64 base, {at['pool']}, q64;",
        "mul.wide.u32 q64, part, 8; add.s64 p64, base, q64;",
        "@write st.global.v2.b32 [p64], {w0,w1};",
        f"mul.wide.u32 q64, place, {job.width // 32}; add.s64 base, {at['scales']}, q64;",
        *_scale_store(0, "write"),
    ]


def _window_store(job: Job, at: dict[str, str]) -> list[str]:
    """The row and, as its tag, the position."""
    lines = [
        f"mul.wide.u32 q64, place, 4; add.s64 p64, {at['tags']}, q64;",
        "setp.eq.and.u32 p, part, 0, write; @p st.global.b32 [p64], pos;",
        *_window_row(at["pool"], "place", "write"),
    ]
    return [*lines, *_window_row(at["out"], "row", "live")] if job.emit else lines


def _window_row(plane: str, row: str, guard: str) -> list[str]:
    """512 bytes of codes, then 16 of scales."""
    return [
        f"mul.wide.u32 q64, {row}, 528; add.s64 base, {plane}, q64;",
        "mul.wide.u32 q64, part, 16; add.s64 p64, base, q64;",
        f"@{guard} st.global.v4.b32 [p64], {{w0,w1,w2,w3}};",
        *_scale_store(512, guard),
    ]


def _scale_store(offset: int, guard: str) -> list[str]:
    """The scale of two threads' values, by the first of them."""
    return [
        "shr.u32 a, part, 1; cvt.u64.u32 q64, a; add.s64 p64, base, q64;",
        f"and.b32 a, part, 1; setp.eq.and.u32 p, a, 0, {guard};",
        f"@p st.global.u8 [p64+{offset}], byte;",
    ]
