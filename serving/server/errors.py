"""Errors as OpenAI's clients read them."""

import re
from typing import Any

from dsv41_jax.errors import UserError

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "unavailable_error",
}
# Names of the engine's fields that the API spells otherwise.
_API_NAMES = {"max_new_tokens": "max_tokens", "stop_ids": "stop_token_ids"}


class ApiError(Exception):
    """An answer other than 200; ``param`` is the field it is about, ``code`` names what programs
    react to, by default the status.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error object of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        code = self.code or self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}


def refused(error: UserError) -> ApiError:
    """HTTP 400 for a request that the engine or the tokenizer refuses."""
    message = str(error)
    for name, api_name in _API_NAMES.items():
        message = re.sub(rf"\b{name}\b", api_name, message)
    field = re.match(r"[a-z_]+", message)
    named = field[0] if field else None
    return ApiError(400, message, "prompt" if named in ("token", "text") else named)
