"""The collectives of a compiled program, read from its HLO text."""

import re
from dataclasses import dataclass
from math import prod

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Asynchronous ones appear as a start and a done; the start carries the operands too.
_CALL = re.compile(rf"= (?P<result>\(?[^=]*?\)?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind. count: how often the program's text names one (inside a loop:
    once). nbytes: bytes of their results on one device.
    """

    count: int
    nbytes: int


def collectives(hlo: str) -> dict[str, Traffic]:
    """Kind -> traffic of ``compiled.as_text()``; kinds that do not occur are left out."""
    found: dict[str, Traffic] = {}
    for line in hlo.splitlines():
        match = _CALL.search(line)
        if match:
            before = found.get(match["kind"], Traffic(0, 0))
            arrays = [_nbytes(*array) for array in _ARRAY.findall(match["result"])]
            results = arrays[len(arrays) // 2 :] if match["start"] else arrays
            found[match["kind"]] = Traffic(before.count + 1, before.nbytes + sum(results))
    return found


def _nbytes(kind: str, bits: str, dims: str) -> int:
    size = 1 if kind == "pred" else int(bits) // 8
    return size * prod(int(n) for n in dims.split(",") if n)
