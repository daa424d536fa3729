"""V4.1's prompt format, reasoning and tool calls through DeepSeek's own deepseek-recipe package.

What the package would decide against the client is kept from it: sampling, lengths, n and usage are
the server's (the package forces a temperature in thinking mode, reads no max_completion_tokens and
knows no n).
"""

import json
from typing import Any

import deepseek_recipe as recipe
import msgspec

from serving.engine import Event
from serving.server.chat import Chat, chat_logprobs, merged
from serving.server.errors import ApiError
from serving.server.protocol import ChatBody, Message, stop_strings
from serving.server.streaming import Piece

_PASSED_ON = ("tool_choice", "reasoning_effort", "thinking", "tools")


class RecipeChat:
    """Renders conversations with the checkpoint's tokenizer.json. hidden: ids that end or begin a
    text and are never shown. reasoning_end: the id of the token between reasoning and content.
    """

    def __init__(
        self, tokenizer_json: str, model: str, hidden: tuple[int, ...], reasoning_end: int
    ):
        self._tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        version = recipe.ModelVersion.DeepseekV41Flash
        self._options = recipe.ConversionOptions().with_model_alias(model, version)
        self._model, self._hidden = model, frozenset(hidden)
        self._reasoning_end = reasoning_end

    def prepare(self, body: ChatBody) -> Chat:
        converted = self._convert(body)
        try:
            prompt = self._encoding.encode(converted.conversation)
        except RuntimeError as error:
            raise ApiError(400, f"messages: {error}", "messages") from None
        logprobs = chat_logprobs(body)

        def new_answer() -> RecipeAnswer:
            generator = recipe.ChatCompletionRequest.chunk_generator(converted, "", self._model)
            options = converted.parsing_options
            parser = recipe.StreamProcessor(generator, options, self._tokenizer)
            return RecipeAnswer(parser, self._hidden, logprobs)

        thinks = converted.conversation.thinking_mode
        return Chat(prompt, (), new_answer, self._reasoning_end if thinks else None)

    def _convert(self, body: ChatBody) -> recipe.ConversationRequest:
        """The conversation; ApiError 400 with the package's own words."""
        request: dict[str, Any] = {"model": self._model, "messages": _messages(body.messages)}
        fields = {name: getattr(body, name) for name in _PASSED_ON}
        fields["stop"] = stop_strings(body) or None
        request |= {name: value for name, value in fields.items() if value is not None}
        converted = self._try(request)
        if not isinstance(converted, str):
            return converted
        # The field is at fault without which the package has no complaint.
        without = {name: {k: v for k, v in request.items() if k != name} for name in fields}
        found = (n for n in fields if n in request and not isinstance(self._try(without[n]), str))
        field = next(found, "messages")
        raise ApiError(400, f"{field}: {converted}", field)

    def _try(self, request: dict[str, Any]) -> recipe.ConversationRequest | str:
        """The conversation, or what the package says against it."""
        try:
            return recipe.ChatCompletionRequest(json.dumps(request)).convert(self._options)
        except recipe.ConversionError as error:
            return json.loads(error.body)["error"]["message"]
        except ValueError as error:
            return str(error)
        except RecursionError:
            return "nested too deeply"


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As the package takes them: developer is system, null fields are left out."""
    plain = msgspec.to_builtins(messages)
    for message in plain:
        if message["role"] == "developer":
            message["role"] = "system"
        message.pop("annotations", None)
    return plain


class RecipeAnswer:
    """Reasoning, content and tool calls of one choice as the package's parser tells them apart. The
    parser also looks for the stop strings: only outside reasoning and tool calls.
    """

    def __init__(
        self, parser: recipe.StreamProcessor, hidden: frozenset[int], logprobs: int | None
    ):
        self._parser, self._hidden, self._logprobs = parser, hidden, logprobs
        self._started = self.done = self.shown = False
        self.reasoning_tokens: int | None = None

    def push(self, event: Event) -> list[Piece]:
        chunks = [] if self._started else self._parser.push(recipe.InferenceChunk.ready())
        self._started = True
        token = event.token
        if token.token_id not in self._hidden:
            chunks += self._parser.push(self._chunk(event))
        if self._parser.finished:
            self.done = True
        elif event.finished:
            stopped = event.sequence.result.finish_reason == "stop"
            reasons = recipe.InferenceFinishReason
            reason = reasons.Stop if stopped else reasons.Length
            chunks += self._parser.push(recipe.InferenceChunk.finish(reason))
        return [self._piece(json.loads(chunk.to_json())) for chunk in chunks]

    def merge(self, pieces: list[Piece]) -> Piece:
        return merged(pieces)

    def _chunk(self, event: Event) -> recipe.InferenceChunk:
        token, scores = event.token, None
        if self._logprobs is not None:
            scores = [(token.logprob, list(token.top[: self._logprobs]))]
        return recipe.InferenceChunk.tokens([token.token_id], scores)

    def _piece(self, chunk: dict[str, Any]) -> Piece:
        choice = chunk["choices"][0]
        details = (chunk.get("usage") or {}).get("completion_tokens_details") or {}
        self.reasoning_tokens = details.get("reasoning_tokens", self.reasoning_tokens)
        delta = choice["delta"]
        self.shown |= bool(delta.get("content") or delta.get("tool_calls"))
        return {name: choice[name] for name in ("delta", "logprobs", "finish_reason")}
