"""The pages of the global cache, as plain numbers on the host."""

from collections.abc import Iterable

from dsv41_jax.errors import UserError


class PagePool:
    """Hands out page numbers 0 .. pages-1 and counts who holds each."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(reversed(range(pages)))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """``count`` free pages, one holder each; UserError, and no page taken, if there are too
        few.
        """
        if count > self.free:
            raise UserError(f"{count} pages are needed, {self.free} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each page; ``ValueError`` for a page that nobody holds."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less of each page; without holders it is free. ``ValueError`` if nobody holds
        it.
        """
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        if not 0 <= page < self.pages or not self._holders[page]:
            raise ValueError(f"{page=} must be a page in use")

    def check(self) -> None:
        """A page is free exactly if nobody holds it, and is free once."""
        unheld = [page for page in range(self.pages) if not self._holders[page]]
        assert sorted(self._free) == unheld
        assert all(count >= 0 for count in self._holders)
