"""The three bf16 planes of ``fn`` in the order in which the tensor cores take them, for many rows.

Of 16 columns of a product, index 8 h + 2 q + l of product j of 32 columns is column 8 q + 4 j + 2 h
+ l: then a thread's 16 bytes of a row are its operands of two products. The image is bf16 [K / 16,
9 groups, 2 halves h, 8 mixes, 8], three groups a plane.
"""

from pallas_kernels.mhc.broad_shape import DEEP, PRODUCT_BYTES, Broad
from pallas_kernels.mhc.fused_ptx import vector
from pallas_kernels.mhc.products_ptx import MIXES, STEP, split

THREADS = 128


def blocks(s: Broad) -> int:
    return s.k // STEP * MIXES // THREADS


def program(s: Broad) -> list[str]:
    """Operands: fn, base, scale, image out (GMEM), block. A thread takes 32 columns of a mix. Base
    and scale, which a later launch reads, are fetched to L2.
    """
    lines = [
        ".reg .b32 tid,mix,group,at,a,lo,hi,f<32>,w<48>; .reg .b64 q64,p64,fp,op; .reg .pred p;",
        f"mov.u32 tid, %tid.x; mad.lo.u32 a, $4, {THREADS}, tid; setp.eq.u32 p, a, 0;",
        "mov.b64 p64, $1; @p prefetch.global.L2 [p64];",
        "mov.b64 p64, $2; @p prefetch.global.L2 [p64];",
        f"and.b32 mix, a, 7; shr.u32 a, a, 3; div.u32 at, a, {MIXES // 8};",
        f"mul.lo.u32 group, at, {MIXES // 8}; sub.u32 group, a, group;",
        f"mad.lo.u32 a, group, 8, mix; mul.wide.u32 fp, a, {4 * s.k};",
        f"mul.wide.u32 q64, at, {4 * STEP}; add.s64 fp, fp, q64; add.s64 fp, fp, $0;",
        *[f"ld.global.nc.v4.b32 {vector('f', e)}, [fp+{4 * e}];" for e in range(0, 32, 4)],
        f"mul.wide.u32 op, at, {STEP // DEEP * PRODUCT_BYTES}; add.s64 op, op, $3;",
        "mul.lo.u32 a, group, 256; mad.lo.u32 a, mix, 16, a; cvt.u64.u32 q64, a;",
        "add.s64 op, op, q64;",
        *split(16),
    ]
    for part in range(3):
        for j in range(2):
            for half in range(2):
                words = ",".join(f"w{16 * part + 4 * q + 2 * j + half}" for q in range(4))
                place = j * PRODUCT_BYTES + part * MIXES // 8 * 256 + half * 128
                lines.append(f"st.global.v4.b32 [op+{place}], {{{words}}};")
    return lines
