"""What a compiled program launches, from its HLO."""

import re
from collections import Counter

_RESULT = re.compile(r" = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"}
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu\w*".*?op_name="([^"]*)"')


def launches(hlo: str) -> int:
    """Instructions of the entry computation that run something; a loop counts once, its body not
    at all.
    """
    entry = hlo[hlo.index("\nENTRY ") :].split("\n}", 1)[0]
    found = (_RESULT.search(line) for line in entry.splitlines()[2:])
    return sum(match is not None and match[1] not in _FREE for match in found)


def kernels(hlo: str) -> dict[str, int]:
    """Name of each Mosaic kernel -> how often the program calls it; all else is XLA's."""
    names = (name.split("/") for name in _KERNEL.findall(hlo))
    return dict(Counter(parts[-2] if len(parts) > 1 else parts[0] for parts in names))
