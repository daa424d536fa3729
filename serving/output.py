"""Text of a growing answer, with stop strings held back until they are decided."""

from collections.abc import Sequence

from dsv41_jax.tokenizer import Detokenizer, Tokenizer


class TextOutput:
    """Feeds tokens to a detokenizer and cuts the text before the stop string that is complete
    first, of two complete at once the longer.

    ``text`` is what may be shown: it never contains a stop string, nor the beginning of one that
    may still complete.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._pieces = Detokenizer(tokenizer, skip_special=True)
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """The new text that a token lets out; sets ``stopped`` when a stop string is complete. An
        id of the vocabulary that the tokenizer lacks has no text.
        """
        if not self._tokenizer.knows(token_id):
            return ""
        return self._let_out(self._pieces.push(token_id), last=False)

    def finish(self) -> str:
        """What was held back at the end of the answer."""
        return "" if self.stopped is not None else self._let_out(self._pieces.finish(), last=True)

    def _let_out(self, piece: str, *, last: bool) -> str:
        if self.stopped is not None:
            return ""
        self._held += piece
        at = [(self._held.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in at if start >= 0]
        if found:
            _, end, self.stopped = min(found)
        else:
            end = len(self._held) - (0 if last else self._open_tail())
        out, self._held = self._held[:end], self._held[end:]
        self.text += out
        return out

    def _open_tail(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
