"""Which ranks hold which pages, from what they tell of their caches."""

from collections.abc import Hashable, Iterable, Sequence

from serving.routing.score import Target


class Residency:
    """Pages by key, where a key stands for all tokens up to the end of its page."""

    def __init__(self) -> None:
        self._bits: dict[Target, int] = {}
        self._holders: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, target: Target, keys: Iterable[Hashable]) -> None:
        """A rank holds these pages from now on."""
        bit = self._bits.setdefault(target, 1 << len(self._bits))
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | bit

    def removed(self, target: Target, keys: Iterable[Hashable]) -> None:
        """It holds them no more; what it did not hold is ignored."""
        bit = self._bits.get(target, 0)
        for key in keys:
            left = self._holders.get(key, 0) & ~bit
            if left:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def overlaps(self, keys: Sequence[Hashable]) -> dict[Target, int]:
        """How many leading pages of a prompt each rank holds that holds any."""
        found: dict[Target, int] = {}
        alive = dict(self._bits)
        everyone = sum(alive.values())
        for count, key in enumerate(keys):
            holders = self._holders.get(key, 0)
            if holders & everyone == everyone:
                continue
            for target in [t for t, bit in alive.items() if not holders & bit]:
                everyone -= alive.pop(target)
                found[target] = count
            if not alive:
                break
        found |= dict.fromkeys(alive, len(keys))
        return {target: count for target, count in found.items() if count}
