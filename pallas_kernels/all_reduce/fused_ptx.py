"""The all-reduce inside the pass over the streams that follows it: a block of threads has a row.

The streams are on their way while the sublayer's rows cross.
"""

from pallas_kernels.all_reduce import exchange_ptx
from pallas_kernels.all_reduce.exchange import Exchange
from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.mhc import fused_ptx
from pallas_kernels.mhc.fused_ptx import Fused

OUTPUT = ("y0", "y1", "y2", "y3")  # the pass's registers of the sublayer's output


def program(e: Exchange, slot: int, norm_eps: float) -> list[str]:
    """Operands: those of ``mhc.fused_ptx.program``, with the table of this rank behind the other
    GMEM references.
    """
    s = Fused(e.rows, e.width, e.rows, norm_eps)
    own = [
        *exchange_ptx.registers(e),
        *([f"@!{s.on[1:]} bra SUMMED;"] if s.on else []),
        f"mul.wide.u32 offset, row, {2 * e.width}; mul.wide.u32 mine, tid, 16;",
        "add.s64 offset, offset, mine;",
        *exchange_ptx.one_shot(e, slot, OUTPUT, "$8"),
    ]
    lines = [text.replace("$9", "$10").replace("$8", "$9") for text in fused_ptx.program(s)]
    # From this barrier on the row at hand is used.
    ready = lines.index(f"barrier.sync {BARRIER}, {s.threads};")
    return lines[:ready] + own + lines[ready:]
