"""The pages of the global cache, as plain numbers on the host."""

from dsv41_jax.errors import UserError


class PagePool:
    """Hands out page numbers 0 .. pages-1; a page belongs to one holder at a time."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(reversed(range(pages)))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The lowest-numbered free pages; UserError, and no page taken, if there are too few."""
        if count > self.free:
            raise UserError(f"{count} pages are needed, {self.free} of {self.pages} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages; ``ValueError`` for a page that is free or outside the pool."""
        for page in pages:
            if page in self._free or not 0 <= page < self.pages:
                raise ValueError(f"{page=} must be a page in use")
            self._free.append(page)
        self._free.sort(reverse=True)

    def check(self) -> None:
        """No page is free twice and none lies outside the pool."""
        assert len(set(self._free)) == len(self._free) <= self.pages
        assert all(0 <= page < self.pages for page in self._free)
