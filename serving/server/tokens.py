"""Single tokens as text and as bytes, for reports of log probabilities."""

from typing import Any

from dsv41_jax.tokenizer import Tokenizer
from serving.request import TokenLogprobs

_REPLACEMENT = "\ufffd"


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself if it is
    printable, else one of the characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_char()


class TokenTexts:
    """Text and bytes of single token ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """As the tokenizer decodes it alone; empty for an id that it does not know."""
        known = token_id < len(self._tokenizer)
        return self._tokenizer.decode([token_id]) if known else ""

    def bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character only."""
        text = self.text(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        return bytes(_BYTES.get(char, 0) for char in self._tokenizer.token(token_id))

    def label(self, token_id: int) -> str:
        """A text that tells tokens apart: ``bytes:\\xNN`` for an incomplete character."""
        text = self.text(token_id)
        if _REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))

    def chat(self, token: TokenLogprobs, alternatives: int) -> dict[str, Any]:
        """An entry of a chat choice's ``logprobs.content``."""
        entry = self._chat_entry(token.token_id, token.logprob)
        top = [self._chat_entry(*pair) for pair in token.top[:alternatives]]
        return {**entry, "top_logprobs": top}

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self.bytes(token_id))
        return {"token": self.text(token_id), "logprob": logprob, "bytes": raw}

    def completion(self, token: TokenLogprobs, alternatives: int, offset: int) -> dict[str, Any]:
        """One token of a completion choice's ``logprobs``; the sampled token is always in
        ``top_logprobs``.
        """
        top = {self.label(token_id): value for token_id, value in token.top[:alternatives]}
        label = self.label(token.token_id)
        return {
            "tokens": [label],
            "token_logprobs": [token.logprob],
            "top_logprobs": [top | {label: token.logprob}],
            "text_offset": [offset],
        }

    def prompt(self, tokens: list[TokenLogprobs], alternatives: int) -> list[Any]:
        """``prompt_logprobs`` as vLLM reports them: null for the first token, then a map by id."""
        return [None, *(self._prompt_entry(token, alternatives) for token in tokens)]

    def _prompt_entry(self, token: TokenLogprobs, alternatives: int) -> dict[str, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
        pairs = {token.token_id: token.logprob, **dict(token.top[:alternatives])}
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": ranks.get(token_id),
                "decoded_token": self.text(token_id),
            }
            for token_id, logprob in pairs.items()
        }
