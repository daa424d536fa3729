"""From a chat's messages to a prompt, and from tokens to the assistant's message."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.prompt import prompt_ids
from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Event
from serving.server.errors import ApiError
from serving.server.protocol import ChatBody, Message, stop_strings
from serving.server.streaming import Answer, Piece
from serving.server.tokens import TokenTexts

# Spellings that a tokenizer of V4.1 has as tokens of their own (ARCHITECTURE section 13).
V41_TOKENS = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")


@dataclass(frozen=True)
class Chat:
    """A prompt ready to run. stop: strings that the engine looks for (a format may do it itself).
    new_answer: makes the parser of one choice. reasoning_end: the token that ends the reasoning
    with which an answer begins, None if there is none.
    """

    prompt: list[int]
    stop: tuple[str, ...]
    new_answer: Callable[[], Answer]
    reasoning_end: int | None = None


class ChatFormat(Protocol):
    """Turns a chat request into a prompt; ApiError 400 for what it cannot express."""

    def prepare(self, body: ChatBody) -> Chat: ...


def speaks_v41(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has V4.1's role, thinking and tool tokens."""
    return all(len(tokenizer.encode(token, bos=False)) == 1 for token in V41_TOKENS)


def chat_format(
    checkpoint: str | Path, cfg: Config, tokenizer: Tokenizer, name: str, model: str
) -> ChatFormat:
    """V4.1's own format for a tokenizer that can spell it, else the plain one. name: ``auto``,
    ``v41`` or ``plain``.
    """
    texts = TokenTexts(tokenizer)
    if name == "plain" or (name == "auto" and not speaks_v41(tokenizer)):
        return PlainChat(tokenizer, texts)
    if not speaks_v41(tokenizer):
        raise UserError(f"--chat-format v41: the tokenizer must have {', '.join(V41_TOKENS)}")
    if find_spec("deepseek_recipe") is None:
        raise UserError("V4.1's chat format needs deepseek-recipe: pip install 'dsv41-jax[serve]'")
    from serving.server.recipe import RecipeChat

    path = Path(checkpoint) / "tokenizer.json"
    [reasoning_end] = tokenizer.encode("</think>", bos=False)
    hidden = cfg.bos_token_id, cfg.eos_token_id
    return RecipeChat(path.read_text("utf-8"), model, hidden, reasoning_end)


def chat_logprobs(body: ChatBody) -> int | None:
    """Alternatives a token, None for no report."""
    return (body.top_logprobs or 0) if body.logprobs else None


class PlainChat:
    """Role lines for checkpoints without V4.1's tokens: ``role: content`` for each message, then
    ``assistant:``. It has no tools and no reasoning, and special tokens spelled out in a message
    count as such.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts):
        self._tokenizer, self._texts = tokenizer, texts

    def prepare(self, body: ChatBody) -> Chat:
        for field in ("tools", "tool_choice", "thinking", "reasoning_effort"):
            if getattr(body, field) not in (None, "none", [], {"type": "disabled"}):
                rule = "needs a checkpoint whose tokenizer has V4.1's special tokens"
                raise ApiError(400, f"{field}: {rule}", field)
        lines = [_line(index, message) for index, message in enumerate(body.messages)]
        if not lines:
            raise ApiError(400, "messages: must hold at least one message", "messages")
        prompt = prompt_ids(self._tokenizer, "\n".join([*lines, "assistant:"]))
        logprobs = chat_logprobs(body)
        return Chat(prompt, stop_strings(body), lambda: PlainAnswer(self._texts, logprobs))


def _line(index: int, message: Message) -> str:
    field = f"messages[{index}]"
    for name in ("tool_calls", "tool_call_id", "reasoning_content", "prefix"):
        if getattr(message, name):
            rule = "needs a checkpoint whose tokenizer has V4.1's special tokens"
            raise ApiError(400, f"{field}.{name}: {rule}", f"{field}.{name}")
    if message.role not in ("system", "developer", "user", "assistant"):
        raise ApiError(400, f"{field}.role: {message.role!r} is not supported", f"{field}.role")
    if message.content is None:
        raise ApiError(400, f"{field}.content: must be a text", f"{field}.content")
    role = "system" if message.role == "developer" else message.role
    return f"{role}: {content_text(message)}"


def content_text(message: Message) -> str:
    """The text of a message's content, its parts joined."""
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class PlainAnswer:
    """The text as the message's content."""

    done: bool = False
    reasoning_tokens: int | None = None

    def __init__(self, texts: TokenTexts, logprobs: int | None):
        self._texts, self._logprobs = texts, logprobs
        self._started = self.shown = False

    def push(self, event: Event) -> list[Piece]:
        pieces: list[Piece] = []
        if not self._started:
            pieces.append(piece({"role": "assistant", "content": ""}))
            self._started = True
        scores = None
        if self._logprobs is not None:
            scores = {"content": [self._texts.chat(event.token, self._logprobs)]}
        self.shown |= bool(event.text)
        if event.text or scores:
            pieces.append(piece({"content": event.text}, scores))
        if event.finished:
            pieces.append(piece({}, None, event.sequence.result.finish_reason))
        return pieces

    def merge(self, pieces: list[Piece]) -> Piece:
        return merged(pieces)


def piece(delta: Piece, logprobs: Piece | None = None, reason: str | None = None) -> Piece:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": reason}


def merged(pieces: list[Piece]) -> Piece:
    """A whole choice from the pieces of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: dict[str, list[Any]] | None = None
    reason = None
    for part in pieces:
        for name, value in part["delta"].items():
            if name == "tool_calls":
                _add_calls(message.setdefault(name, []), value)
            elif name != "role" and value is not None:
                message[name] = message.get(name, "") + value
        for name, entries in (part["logprobs"] or {}).items():
            logprobs = logprobs or {}
            logprobs.setdefault(name, []).extend(entries)
        reason = part["finish_reason"] or reason
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return {"message": message, "logprobs": logprobs, "finish_reason": reason}


def _add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            function = {"name": delta["function"]["name"], "arguments": ""}
            calls.append({"id": delta["id"], "type": "function", "function": function})
        calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments", "")
