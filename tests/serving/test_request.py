"""Requests: what is refused, and how a result ends."""

from dataclasses import replace

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.request import Request, Result, TokenLogprobs, check_request

GOOD = Request(prompt=(0, 5, 511), max_new_tokens=4)


@pytest.fixture(scope="module")
def cfg():
    return Config.preset("tiny")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt": (0,), "max_new_tokens": 127},
        {"temperature": 1e-6, "top_p": 1e-6, "top_k": 2**31 - 1, "seed": 2**32 - 1},
        {"temperature": 100.0, "top_k": 1000, "top_p": 1.0},
    ],
)
def test_good_requests(cfg, change):
    check_request(replace(GOOD, **change), cfg)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ()}, "prompt: must hold at least one token"),
        ({"prompt": (3, -1)}, "token id -1 at index 1 of the prompt must be in [0, 512)"),
        ({"prompt": (512,)}, "token id 512 at index 0 of the prompt must be in [0, 512)"),
        ({"prompt": (2**63,)}, f"token id {2**63} at index 0"),
        ({"prompt": (1,) * 129}, "prompt of 129 tokens must fit max_position_embeddings=128"),
        ({"prompt": (1,) * 125}, "max_position_embeddings=128"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1 must be at least 0"),
        ({"top_k": 2**31}, f"top_k={2**31}"),
        ({"seed": -1}, "seed=-1 must be an unsigned 32-bit number"),
        ({"seed": 2**32}, f"seed={2**32}"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_requests_name_field_value_and_range(cfg, change, words):
    with pytest.raises(UserError) as error:
        check_request(replace(GOOD, **change), cfg)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [((5, 6), None), ((5, 1), "stop"), ((5, 6, 7, 8), "length"), ((5, 6, 7, 2), "stop")],
)
def test_results_end_by_stop_id_or_length(tokens, reason):
    """A stop id in the last place is a stop."""
    request, result = replace(GOOD, stop_ids=(1, 2)), Result()
    for token in tokens:
        assert result.finish_reason is None
        result.add(TokenLogprobs(token, -0.5, ()), request)
    assert result.token_ids == list(tokens) and result.finish_reason == reason
    assert [token.token_id for token in result.logprobs] == list(tokens)
