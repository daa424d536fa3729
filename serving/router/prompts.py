"""The token ids of a request's prompt, as the worker will make them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.kv_events.hashes import page_hashes
from serving.router.ask import CHAT, Ask
from serving.router.policy import UNKNOWN, Prompt
from serving.server import protocol
from serving.server.errors import ApiError

_log = logging.getLogger(__name__)
_MOST_ID = _MOST_PRIORITY = 2**31


class Unreadable(Exception):
    """A prompt that a worker will refuse, or that nobody could turn into ids."""


class Texts(Protocol):
    """Ids of texts. ApiError, UserError or Unreadable for what cannot be turned into any."""

    async def plain(self, ask: Ask, text: str) -> list[int]: ...

    async def chat(self, ask: Ask) -> list[int]: ...


class LocalTexts:
    """By the tokenizer and the chat format of a checkpoint directory."""

    def __init__(self, checkpoint: str, chat_format: str):
        """UserError if the directory lacks config.json or tokenizer.json. chat_format: as the
        workers have it.
        """
        from serving.server.chat import chat_format as format_of

        config = Config.from_json(Path(checkpoint) / "config.json")
        self._tokenizer = Tokenizer.from_dir(checkpoint, config)
        self._chat = format_of(checkpoint, config, self._tokenizer, chat_format, "router")

    async def plain(self, ask: Ask, text: str) -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def chat(self, ask: Ask) -> list[int]:
        body = protocol.decode(ask.body, protocol.ChatBody)
        return (await asyncio.to_thread(self._chat.prepare, body)).prompt


class RemoteTexts:
    """By a worker's ``/tokenize``, which is told the messages of a chat alone: if it has tools, or
    another than the usual thinking, its first page differs already and none will seem cached.
    """

    def __init__(self, ids: Callable[[Ask, dict[str, Any]], Awaitable[list[int]]]):
        """ids: a worker's answer to such a body, on behalf of a request; Unreadable if none."""
        self._ids = ids

    async def plain(self, ask: Ask, text: str) -> list[int]:
        return await self._ids(ask, {"prompt": text})

    async def chat(self, ask: Ask) -> list[int]:
        return await self._ids(ask, {"messages": ask.fields.get("messages")})


async def read_prompt(ask: Ask, texts: Texts, page_size: int) -> Prompt:
    """The prompts of a request, ``UNKNOWN`` if they cannot be read: a worker will say why."""
    try:
        if ask.path.partition("?")[0] == CHAT:
            parts = [await texts.chat(ask)]
        else:
            parts = [await _ids(ask, texts, part) for part in _parts(ask.fields.get("prompt"))]
    except (ApiError, UserError, Unreadable) as error:
        _log.debug("a prompt could not be read: %s", error)
        return UNKNOWN
    made = await asyncio.to_thread(_prompt, parts, page_size)
    priority = ask.fields.get("priority")
    known = type(priority) is int and abs(priority) < _MOST_PRIORITY
    return replace(made, priority=priority) if known else made


async def _ids(ask: Ask, texts: Texts, part: str | list[int]) -> list[int]:
    return await texts.plain(ask, part) if isinstance(part, str) else part


def _parts(prompt: Any) -> list[Any]:
    """Texts and lists of ids; Unreadable for anything else."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and all(isinstance(p, str) or _is_ids(p) for p in prompt):
        return prompt
    raise Unreadable("neither texts nor token ids")


def _is_ids(prompt: Any) -> bool:
    ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
    return ids and (not prompt or (min(prompt) >= 0 and max(prompt) < _MOST_ID))


def _prompt(parts: list[list[int]], page_size: int) -> Prompt:
    first = parts[0] if parts else []
    whole = max(len(first) - 1, 0) // page_size * page_size
    tokens = first if len(parts) == 1 else [token for part in parts for token in part]
    return Prompt(tokens, page_hashes(first[:whole], page_size), page_size)
