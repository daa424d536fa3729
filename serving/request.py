"""What a caller asks for and gets."""

from dataclasses import dataclass, field

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.prompt import check_token_ids


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how to continue it. temperature 0 is greedy; top_k 0 keeps every
    id.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """A generated token's log probability and the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Result:
    """Tokens generated so far. encoder_rows, decoder_rows: prompt rows through the layers up to the
    last KV source and after it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    encoder_rows: int = 0
    decoder_rows: int = 0
    cached_tokens: int = 0
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


def check_request(request: Request, cfg: Config) -> None:
    """UserError naming the field, its value and what is allowed."""
    limit = cfg.max_position_embeddings
    check_token_ids(request.prompt, cfg)
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={request.max_new_tokens} must be at least 1")
    if len(request.prompt) + request.max_new_tokens > limit:
        raise UserError(
            f"prompt of {len(request.prompt)} tokens with max_new_tokens={request.max_new_tokens} "
            f"must fit max_position_embeddings={limit}"
        )
    ranges = {
        "temperature": (
            request.temperature,
            0 <= request.temperature < float("inf"),
            "finite and at least 0",
        ),
        "top_p": (request.top_p, 0 < request.top_p <= 1, "above 0 and at most 1"),
        "top_k": (request.top_k, 0 <= request.top_k < 2**31, "at least 0"),
        "seed": (request.seed, 0 <= request.seed < 2**32, "an unsigned 32-bit number"),
    }
    for name, (value, valid, allowed) in ranges.items():
        if not valid:
            raise UserError(f"{name}={value} must be {allowed}")
