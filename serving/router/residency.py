"""Which pages the ranks of a fleet hold, on the device and in the pools behind them."""

from collections.abc import Iterable, Sequence

from serving.kv_events.wire import DEVICE, Cleared, Event, Removed, Stored
from serving.routing.index import Residency
from serving.routing.score import Overlap, Target

# Pages a call: some milliseconds.
_SWEPT = 4096


class DevicePages:
    """Device pages by rank. A rank may lose a million of them at once: these are looked up no more
    and swept away a few at a time, while the rank goes on under another name.
    """

    def __init__(self) -> None:
        self._index = Residency()
        self._names: dict[Target, Target] = {}
        self._held: dict[Target, set[int]] = {}
        self._lost: list[tuple[Target, list[int]]] = []
        self._unused: list[Target] = []
        self._made = 0

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def apply(self, target: Target, event: Stored | Removed) -> None:
        """A rank has got or lost pages."""
        name = self._names.get(target) or self._name(target)
        if isinstance(event, Stored):
            self._index.stored(name, event.hashes)
            self._held[target].update(event.hashes)
        else:
            self._index.removed(name, event.hashes)
            self._held[target].difference_update(event.hashes)

    def clear(self, target: Target) -> None:
        """A rank has lost everything."""
        if name := self._names.pop(target, None):
            self._lost.append((name, list(self._held.pop(target))))

    def overlaps(self, hashes: Sequence[int]) -> dict[Target, int]:
        """How many leading pages of a prompt each rank holds that holds any."""
        found = self._index.overlaps(hashes)
        return {target: found[name] for target, name in self._names.items() if name in found}

    def sweep(self) -> None:
        """Forget some of the pages that were lost."""
        if self._lost:
            name, pages = self._lost[-1]
            self._index.removed(name, pages[-_SWEPT:])
            del pages[-_SWEPT:]
            if not pages:
                self._lost.pop()
                self._unused.append(name)

    def _name(self, target: Target) -> Target:
        if not self._unused:
            self._unused.append(Target("", self._made))
            self._made += 1
        self._names[target] = self._unused.pop()
        self._held[target] = set()
        return self._names[target]


class Pages:
    """Device pages by rank. A pool is one for all ranks that load from it: what one of them puts
    there the others find, and what one of them misses is gone.
    """

    def __init__(self) -> None:
        self.device, self._pooled = DevicePages(), Residency()
        self._pools: dict[Target, Target] = {}
        self._put: dict[Target, set[int]] = {}

    def join(self, target: Target, pool: str | None) -> None:
        """pool: a name that the ranks of one pool have in common, None without one."""
        if pool is not None:
            self._pools[target] = Target(pool, 0)

    def leave(self, target: Target) -> None:
        """It holds nothing that anybody could ask for."""
        self.apply(target, [Cleared()])
        self._pools.pop(target, None)

    def apply(self, target: Target, events: Iterable[Event]) -> None:
        """What a rank tells of its pages. A rank that begins anew takes what it has put into the
        pool out of this view: nobody would tell of its end.
        """
        self.device.sweep()
        for event in events:
            if isinstance(event, Cleared):
                self.device.clear(target)
                self._lost(target, self._put.pop(target, set()))
            elif event.medium == DEVICE:
                self.device.apply(target, event)
            elif isinstance(event, Stored):
                self._put.setdefault(target, set()).update(event.hashes)
                if pool := self._pools.get(target):
                    self._pooled.stored(pool, event.hashes)
            else:
                self._put.get(target, set()).difference_update(event.hashes)
                self._lost(target, event.hashes)

    def overlaps(
        self, hashes: Sequence[int], page_size: int, targets: Iterable[Target]
    ) -> dict[Target, Overlap]:
        """What of a prompt's pages each of the ranks has and can load, in tokens."""
        self.device.sweep()
        device, pooled = self.device.overlaps(hashes), self._pooled.overlaps(hashes)
        found = {}
        for target in targets:
            pool = self._pools.get(target)
            loads = pooled.get(pool, 0) if pool is not None else 0
            found[target] = Overlap(device.get(target, 0) * page_size, loads * page_size)
        return found

    def _lost(self, target: Target, hashes: Iterable[int]) -> None:
        if pool := self._pools.get(target):
            self._pooled.removed(pool, hashes)
