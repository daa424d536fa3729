"""The FastAPI application: routes, and what every answer has in common."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from serving.kv_events.publisher import Publisher
from serving.request import Request as EngineRequest
from serving.server import protocol
from serving.server.announce import announcement, data_rank
from serving.server.chat import ChatFormat, chat_logprobs
from serving.server.completions import TextAnswer
from serving.server.disconnect import unless_gone
from serving.server.errors import ApiError, refused
from serving.server.limits import Gate, GateMiddleware, ServerOptions, error_response, read_body
from serving.server.metrics import Metrics
from serving.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    ModelFacts,
    TokenizeBody,
    engine_requests,
)
from serving.server.streaming import (
    CHAT,
    COMPLETION,
    Answer,
    EventStream,
    Generation,
    Kind,
)
from serving.server.structured import grammar_of
from serving.server.tokens import TokenTexts
from serving.server.transfer import handoffs, shared
from serving.server.worker import Job, Worker

# The status that nobody reads: the client went first.
_GONE = 499
_DEFAULT_COMPLETION_TOKENS = 16


def create_app(
    engine: Engine, chat: ChatFormat, options: ServerOptions, events: Publisher | None = None
) -> FastAPI:
    """The application of a warm engine. events: of the engine, if it publishes any; not started.
    The application's state: ``gate`` for the drain, ``worker``.
    """
    server = Server(engine, chat, options, events)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        if events is not None:
            events.start()
        yield
        await server.worker.stop()
        engine.close()
        if events is not None:
            events.close()
        if engine.grammars is not None:
            engine.grammars.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate, app.state.worker = server.gate, server.worker
    app.add_middleware(GateMiddleware, gate=server.gate)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(UserError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_error)
    app.add_exception_handler(Exception, _on_error)
    for path, handler, method in (
        ("/v1/chat/completions", server.chat_completions, "POST"),
        ("/v1/completions", server.completions, "POST"),
        ("/v1/models", server.models, "GET"),
        ("/v1/models/{name:path}", server.model, "GET"),
        ("/v1/chat/completions/render", server.render_chat, "POST"),
        ("/v1/completions/render", server.render_completion, "POST"),
        ("/tokenize", server.tokenize, "POST"),
        ("/detokenize", server.detokenize, "POST"),
        ("/worker", server.announce, "GET"),
        ("/health", server.health, "GET"),
        ("/metrics", server.metrics_page, "GET"),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _on_error(_request: Request, error: Exception) -> Response:
    """Every refusal and fault as OpenAI's error object."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, UserError):
        error = refused(error)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return error_response(error)


class Server:
    """The handlers and what they share."""

    def __init__(
        self, engine: Engine, chat: ChatFormat, options: ServerOptions, events: Publisher | None
    ):
        assert engine.tokenizer is not None
        self.engine, self.chat, self.options, self.events = engine, chat, options, events
        self.tokenizer: Tokenizer = engine.tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.gate = Gate(options.api_key)
        ranks = len(engine.ranks)
        pool = engine.kv_pool is not None
        self.metrics = Metrics(options.names[0], engine.options.speculation, ranks, pool=pool)
        self.worker = Worker(engine, self.metrics, max_queue=options.max_queue)
        room = engine.options.pages * engine.options.page_size
        limits = engine.options.max_tokens, engine.cfg.max_position_embeddings, room
        self.facts = ModelFacts(eos=engine.cfg.eos_token_id, context=min(limits))
        self.created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), ChatBody)
        self._check_model(body.model)
        protocol.check_fields(body)
        made, answers = await asyncio.to_thread(self._prepare_chat, body)
        return await self._generate(request, body, CHAT, made, answers, prompts=1)

    async def completions(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), CompletionBody)
        self._check_model(body.model)
        protocol.check_fields(body)
        made = await asyncio.to_thread(self._prepare_completion, body)
        answers: list[Answer] = [TextAnswer(self.texts, body.logprobs) for _ in made]
        prompts = len(made) // (body.n or 1)
        return await self._generate(request, body, COMPLETION, made, answers, prompts)

    def _prepare_chat(self, body: ChatBody) -> tuple[list[EngineRequest], list[Answer]]:
        """Checked requests and the parsers of their answers; without a limit an answer may fill the
        context.
        """
        self._check_count(body.n or 1, "n")
        chat = self.chat.prepare(body)
        grammar = grammar_of(body, self.engine.grammars)
        if grammar is not None:
            grammar = grammar.behind(chat.reasoning_end)
        limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if limit is None:
            limit = max(1, self.facts.context - len(chat.prompt))
        made = engine_requests(
            body,
            chat.prompt,
            self.facts,
            max_tokens=limit,
            logprobs=chat_logprobs(body),
            stop=chat.stop,
            grammar=grammar,
        )
        made = shared(body, made)
        self._check(made, 1)
        return made, [chat.new_answer() for _ in made]

    def _prepare_completion(self, body: CompletionBody) -> list[EngineRequest]:
        made: list[EngineRequest] = []
        prompts = self._prompts(body)
        self._check_count(len(prompts) * (body.n or 1), "prompt")
        grammar = grammar_of(body, self.engine.grammars)
        limit = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        for ids in prompts:
            made += engine_requests(
                body,
                ids,
                self.facts,
                max_tokens=limit,
                logprobs=body.logprobs,
                stop=protocol.stop_strings(body),
                grammar=grammar,
            )
        made = shared(body, made)
        self._check(made, len(prompts))
        return made

    def _check(self, made: list[EngineRequest], prompts: int) -> None:
        """ApiError 400 for what the engine would refuse."""
        # The choices of a prompt differ in their seed only, which grows.
        choices = len(made) // prompts
        for request in (*made[::choices], *made[choices - 1 :: choices]):
            for name in ("logprobs", "prompt_logprobs"):
                if (getattr(request, name) or 0) < 0:
                    raise ApiError(400, f"{name}: must not be negative", name)
            try:
                self.engine.check_request(request)
            except UserError as error:
                raise refused(error) from None

    def _check_count(self, choices: int, field: str) -> None:
        most = self.worker.capacity
        if choices > most:
            rule = f"makes {choices} choices, the server takes at most {most} at once"
            raise ApiError(400, f"{field}: {rule}", field)

    async def _generate(
        self,
        request: Request,
        body: GenerationBody,
        kind: Kind,
        made: list[EngineRequest],
        answers: list[Answer],
        prompts: int,
    ) -> Response:
        """Run checked requests to their end, or until the client goes."""
        rank = data_rank(request.headers, len(self.engine.ranks))
        job = self.worker.submit(made, body.priority or 0, rank)
        generation = Generation(
            kind=kind,
            model=body.model or self.options.names[0],
            job=job,
            answers=answers,
            prompts=prompts,
            texts=self.texts,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
            speculation=self.engine.options.speculation,
        )
        if body.stream:
            # A hand-off that is lost has to be an answer with a status of its own.
            if made[0].ticket is not None and not await self._begun(request, job):
                return Response(status_code=_GONE)
            return EventStream(generation.events(), job.abort)
        try:
            whole = await unless_gone(request.receive, generation.response())
        finally:
            job.abort()
        if whole is None:
            return Response(status_code=_GONE)
        return JSONResponse(whole | handoffs(job))

    async def _begun(self, request: Request, job: Job) -> bool:
        """Wait for the first events of all choices; False if the client goes first."""
        begun = None
        try:
            begun = await unless_gone(request.receive, job.begun())
        finally:
            if begun is None:
                job.abort()
        return begun is not None

    async def models(self) -> Response:
        return JSONResponse(
            {"object": "list", "data": [self._card(name) for name in self.options.names]}
        )

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "dsv41-jax"}
        return card | {"root": self.options.names[0], "max_model_len": self.facts.context}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.names:
            known = ", ".join(self.options.names)
            raise ApiError(404, f"model: {name[:200]!r} is not served, only {known}", "model")

    async def render_chat(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), ChatBody)
        self._check_model(body.model)
        protocol.check_fields(body)
        chat = await asyncio.to_thread(self.chat.prepare, body)
        return JSONResponse(self._rendered(chat.prompt))

    async def render_completion(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), CompletionBody)
        self._check_model(body.model)
        protocol.check_fields(body)
        prompts = await asyncio.to_thread(self._prompts, body)
        return JSONResponse([self._rendered(prompt) for prompt in prompts])

    def _rendered(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What routers read who place a request by the tokens of its prompt."""
        name = self.options.names[0]
        return {"request_id": uuid4().hex, "model": name, "token_ids": list(prompt)}

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        prompts = protocol.prompts_of(body)
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]

    async def tokenize(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", "prompt")
        ids = await asyncio.to_thread(self._tokenize, body)
        return JSONResponse({"count": len(ids), "max_model_len": self.facts.context, "tokens": ids})

    def _tokenize(self, body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            return self.chat.prepare(ChatBody(messages=body.messages)).prompt
        return self.tokenizer.encode(body.prompt or "", bos=body.add_special_tokens)

    async def detokenize(self, request: Request) -> Response:
        body = protocol.decode(await read_body(request, self.options), DetokenizeBody)
        self._check_model(body.model)
        try:
            return JSONResponse({"prompt": self.tokenizer.decode(body.tokens)})
        except UserError as error:
            raise ApiError(400, f"tokens: {error}", "tokens") from None

    async def announce(self) -> Response:
        return JSONResponse(
            announcement(self.engine, self.options, self.facts.context, self.events)
        )

    async def health(self) -> Response:
        """200 while requests are taken, else 503 with the reason."""
        if self.worker.failure is not None:
            return JSONResponse({"status": "failed", "reason": self.worker.failure}, 503)
        if self.gate.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_page(self) -> Response:
        text = await self.worker.metrics_text()
        return Response(text, media_type=CONTENT_TYPE_LATEST)
