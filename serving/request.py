"""What a caller asks for and gets."""

import math
from dataclasses import dataclass, field

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.prompt import check_token_ids
from serving.grammar import Grammar, Matcher
from serving.handoff.ticket import Ticket


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how to continue it.

    temperature 0 is greedy; top_k 0 keeps every id. stop_ids end it and are kept as its last token;
    stop strings end it and are cut off the text. logprobs, prompt_logprobs: alternatives a token,
    None for no report; a request with prompt_logprobs runs every row through every layer and adopts
    no cached prefix. min_tokens: no stop id before, unless the grammar leaves nothing else.
    grammar: what the answer must match; it ends the request when nothing can follow. speculative
    False: no drafts in an engine that makes them; the tokens are the same. hands_off: its first
    token, the only one, waits until another engine can go on with it; ticket: what that one is
    given.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculative: bool = True
    hands_off: bool = False
    ticket: Ticket | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs the tokens that occurred."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log probability and the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Result:
    """Tokens generated so far. encoder_rows, decoder_rows: prompt rows through the layers up to the
    last KV source and after it. cached_tokens: prompt tokens taken from the prefix cache,
    pool_tokens of them from a pool beyond the device. drafted, accepted: draft tokens verified and
    confirmed. prompt_logprobs: of the prompt's second token on. fault: what finish_reason "error"
    is about.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    fault: str | None = None
    encoder_rows: int = 0
    decoder_rows: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def add(self, token: TokenLogprobs, request: Request) -> None:
        """Append a token; sets ``finish_reason`` ("stop" or "length") when it is the last."""
        self.token_ids.append(token.token_id)
        self.logprobs.append(token)
        if token.token_id in request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == request.max_new_tokens:
            self.finish_reason = "length"

    def follow(self, matcher: Matcher) -> None:
        """End with the grammar: "stop" where it is complete, "error" where it cannot go on."""
        if matcher.complete:
            self.finish_reason = "stop"
        elif matcher.fault is not None and self.finish_reason is None:
            self.finish_reason, self.fault = "error", matcher.fault


def check_request(request: Request, cfg: Config) -> None:
    """UserError naming the field, its value and what is allowed."""
    check_token_ids(request.prompt, cfg)
    new, limit = request.max_new_tokens, cfg.max_position_embeddings
    if new < 1:
        raise UserError(f"max_new_tokens={new} must be at least 1")
    if len(request.prompt) + new > limit:
        raise UserError(
            f"prompt of {len(request.prompt)} tokens with max_new_tokens={new} "
            f"must fit max_position_embeddings={limit}"
        )
    for name, (low, high, allowed) in _RANGES.items():
        value = getattr(request, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"{name}={value} must be {allowed}")
    if not 0 <= request.min_tokens <= new:
        raise UserError(f"min_tokens={request.min_tokens} must be between 0 and {new=}")
    ids = [("stop_ids", token) for token in request.stop_ids]
    ids += [("logit_bias", token) for token, _ in request.logit_bias]
    for name, token in ids:
        if not 0 <= token < cfg.vocab_size:
            raise UserError(f"{name}: token id {token} must be in [0, {cfg.vocab_size})")
    for token, bias in request.logit_bias:
        if not -100 <= bias <= 100:
            raise UserError(
                f"logit_bias of token id {token} is {bias}, must be between -100 and 100"
            )
    if any(not stop for stop in request.stop):
        raise UserError("stop: a stop string must not be empty")


_TINY = 5e-324
_RANGES = {
    "temperature": (0, 1e6, "finite and at least 0"),
    "top_p": (_TINY, 1, "above 0 and at most 1"),
    "min_p": (0, 1 - 2**-24, "at least 0 and below 1"),
    "top_k": (0, 2**31 - 1, "at least 0 and below 2^31"),
    "seed": (0, 2**32 - 1, "an unsigned 32-bit number"),
    "repetition_penalty": (_TINY, 1e6, "finite and above 0"),
    "frequency_penalty": (-2, 2, "between -2 and 2"),
    "presence_penalty": (-2, 2, "between -2 and 2"),
}
