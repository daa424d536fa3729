"""Structured output: what an answer must match, and where a request stands in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from serving.grammars import Grammars


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, made by ``Grammars``, that requests may share. first: int32 [ceil(V /
    32)], the ids that may come first. after: None, or the token after which the grammar begins;
    until then everything but the end is allowed (reasoning).
    """

    owner: "Grammars" = field(repr=False)
    compiled: "LLMatcher" = field(repr=False)
    first: np.ndarray = field(repr=False)
    after: int | None = None

    def behind(self, token_id: int | None) -> "Grammar":
        """The same grammar, which begins after a token."""
        return replace(self, after=token_id)

    def start(self) -> "Matcher":
        """A place in it for one request."""
        allowed = self.first if self.after is None else self.owner.all_but_end
        return Matcher(self, self.compiled.deep_copy(), allowed, waiting=self.after is not None)


@dataclass(eq=False)
class Matcher:
    """Where a request stands. allowed: int32 [ceil(V / 32)], bit i % 32 of word i // 32 is set if
    id i may come next. waiting: the grammar has not begun. complete: nothing can follow. fault:
    why it cannot be followed any further.
    """

    grammar: Grammar
    state: "LLMatcher"
    allowed: np.ndarray
    waiting: bool = False
    complete: bool = False
    fault: str | None = None

    def allows_only(self, ids: Sequence[int]) -> bool:
        """Whether every id that may come next is one of these."""
        inside = sum(int(self.allowed[i // 32]) >> i % 32 & 1 for i in set(ids))
        return int(np.bitwise_count(self.allowed.view(np.uint32)).sum()) == inside
