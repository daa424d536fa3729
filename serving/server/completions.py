"""Choices of ``/v1/completions``, and their logprobs."""

from typing import Any

from serving.engine import Event
from serving.server.streaming import Piece
from serving.server.tokens import TokenTexts


class TextAnswer:
    """The text of one choice; ``logprobs`` None for no report."""

    done: bool = False
    reasoning_tokens: int | None = None

    def __init__(self, texts: TokenTexts, logprobs: int | None):
        self._texts, self._logprobs = texts, logprobs
        self._offset = 0
        self.shown = False

    def push(self, event: Event) -> list[Piece]:
        """A piece for a token that lets out text, has logprobs to report or is the last."""
        scores = None
        if self._logprobs is not None:
            scores = self._texts.completion(event.token, self._logprobs, self._offset)
            self._offset += len(scores["tokens"][0])
        self.shown |= bool(event.text)
        reason = event.sequence.result.finish_reason if event.finished else None
        if not (event.text or scores or event.finished):
            return []
        return [{"text": event.text, "logprobs": scores, "finish_reason": reason}]

    def merge(self, pieces: list[Piece]) -> Piece:
        reports = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        logprobs: dict[str, Any] | None = None
        if self._logprobs is not None:
            columns = "tokens", "token_logprobs", "top_logprobs", "text_offset"
            logprobs = {name: [v for r in reports for v in r[name]] for name in columns}
        text = "".join(piece["text"] for piece in pieces)
        return {"text": text, "logprobs": logprobs, "finish_reason": pieces[-1]["finish_reason"]}
