"""What this process holds of the machine's memory, and how much of that it shares with others."""

from dataclasses import dataclass
from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")
_KIB = 1024


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of pages that the process has touched. proportional: each page by the number of
    processes that map it (PSS). shared: pages that others map too; private: all others. huge: of
    both, in huge pages.
    """

    proportional: int
    shared: int
    private: int
    huge: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {gigabytes(n)}" for name, n in vars(self).items())


def process_memory() -> ProcessMemory | None:
    """Of this process now; None where the system does not tell. Takes time in proportion to the
    pages mapped: a quarter of a second for 200 GB of small ones.
    """
    if not _ROLLUP.exists():
        return None
    kib: dict[str, int] = {}
    for line in _ROLLUP.read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)

    def total(*names: str) -> int:
        return _KIB * sum(kib.get(name, 0) for name in names)

    return ProcessMemory(
        proportional=total("Pss"),
        shared=total("Shared_Clean", "Shared_Dirty"),
        private=total("Private_Clean", "Private_Dirty"),
        huge=total("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"),
    )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
