"""An answer on its way to the client: as server-sent events or as one response."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.engine import Event
from serving.server.disconnect import unless_gone
from serving.server.errors import ApiError
from serving.server.tokens import TokenTexts
from serving.server.worker import Job
from serving.speculative import Speculation

Piece = dict[str, Any]


class Answer(Protocol):
    """Makes the pieces of one choice: what a streamed chunk says of it, but for its index.

    done: the answer ended before the engine's. shown: something visible was said.
    """

    done: bool
    shown: bool
    reasoning_tokens: int | None

    def push(self, event: Event) -> list[Piece]: ...

    def merge(self, pieces: list[Piece]) -> Piece:
        """The choice of a response that is not streamed."""
        ...


@dataclass(frozen=True)
class Kind:
    """How one endpoint names what it returns."""

    prefix: str
    whole: str
    chunk: str
    scores_in_choice: bool


COMPLETION = Kind("cmpl-", "text_completion", "text_completion", True)
CHAT = Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", False)


@dataclass
class Generation:
    """One request's choices until they end; each prompt has ``len(answers) / prompts`` of them."""

    kind: Kind
    model: str
    job: Job
    answers: list[Answer]
    prompts: int
    texts: TokenTexts
    include_usage: bool = False
    return_token_ids: bool = False
    speculation: Speculation | None = None
    token_ids: list[list[int]] = field(init=False)
    head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        made = {"id": self.kind.prefix + uuid.uuid4().hex, "created": int(time.time())}
        self.token_ids = [[] for _ in self.answers]
        self.head = {**made, "model": self.model}
        if self.speculation is not None:
            self.head |= self.speculation.marks

    async def response(self) -> dict[str, Any]:
        """The whole answer."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, new in self._pieces():
            pieces[index] += new
        choices = []
        for index, (answer, own) in enumerate(zip(self.answers, pieces, strict=True)):
            choices.append({"index": index, **answer.merge(own), **self._extras(index)})
        body = {**self.head, "object": self.kind.whole, "choices": choices, "usage": self.usage}
        if not self.kind.scores_in_choice:
            body |= {k: v for k, v in choices[0].items() if k == "prompt_logprobs"}
        return body

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events to the last, ``[DONE]``; an error on the way is one of them."""
        usage = {"usage": None} if self.include_usage else {}
        head = {**self.head, "object": self.kind.chunk}
        try:
            async for index, pieces in self._pieces():
                for piece in pieces:
                    yield _event({**head, "choices": [{"index": index, **piece}], **usage})
            if self.include_usage:
                yield _event({**head, "choices": [], "usage": self.usage})
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"

    @property
    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, whatever the number of its choices."""
        firsts = self.job.choices[:: len(self.answers) // self.prompts]
        prompt = sum(len(choice.request.prompt) for choice in firsts)
        cached = sum(choice.cached_tokens for choice in firsts)
        completion = sum(map(len, self.token_ids))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        details = {}
        # The parser may count one more than there are: the marker at the end of the prompt.
        reasoning = [
            min(answer.reasoning_tokens, len(ids))
            for answer, ids in zip(self.answers, self.token_ids, strict=True)
            if answer.reasoning_tokens is not None
        ]
        if reasoning:
            details["reasoning_tokens"] = sum(reasoning)
        if self.speculation is not None:
            results = [c.sequence.result for c in self.job.choices if c.sequence is not None]
            accepted = sum(result.accepted for result in results)
            rejected = sum(result.drafted for result in results) - accepted
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = rejected
        if details:
            usage["completion_tokens_details"] = details
        return usage

    async def _pieces(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        async for choice, event in self.job:
            answer = self.answers[choice.index]
            if fault := event.sequence.result.fault:
                raise ApiError(500, f"the output could not be constrained any further: {fault}")
            self.token_ids[choice.index].append(event.token.token_id)
            pieces = answer.push(event)
            ended = event.finished or answer.done
            if answer.done and not event.finished:
                self.job.close(choice, "stop")
            if ended and not answer.shown and pieces and pieces[-1]["finish_reason"] == "stop":
                self.job.worker.metrics.empty_answers.inc()
            if pieces:
                yield choice.index, pieces

    def _extras(self, index: int) -> dict[str, Any]:
        choice = self.job.choices[index]
        assert choice.sequence is not None
        extras: dict[str, Any] = {}
        if choice.request.prompt_logprobs is not None:
            scores = choice.sequence.result.prompt_logprobs
            extras["prompt_logprobs"] = self.texts.prompt(scores, choice.request.prompt_logprobs)
        if self.return_token_ids:
            extras["prompt_token_ids"] = list(choice.request.prompt)
            extras["token_ids"] = self.token_ids[index]
        return extras


class EventStream(Response):
    """Sends events until they end or the client goes; ``on_end`` runs at once in either case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._on_end()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
