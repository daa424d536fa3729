"""The error for bad input, told apart from faults of the program itself."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_LISTED = 100


class UserError(ValueError):
    """Bad input that a command reports as `error: ...` with exit status 2.

    `problems` holds every problem found; the message lists the first hundred.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


def raise_problems(subject: str, problems: Sequence[str]) -> NoReturn:
    """Raise one UserError about `subject` that names each of the (one or more) `problems`."""
    if len(problems) == 1:
        named = problems[0].startswith(subject)
        raise UserError(problems[0] if named else f"{subject}: {problems[0]}", problems)
    lines = [f"{subject}: {len(problems)} problems", *problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"... and {len(problems) - _LISTED} more")
    raise UserError("\n  ".join(lines), problems)


def collected(subject: str, *steps: Callable[[], Any]) -> list[Any]:
    """Results of the steps; all run, and what their UserErrors name is raised as one."""
    results, problems = [], []
    for step in steps:
        try:
            results.append(step())
        except UserError as error:
            problems += error.problems
    if problems:
        raise_problems(subject, problems)
    return results


def shorten(value: Any, limit: int = 80) -> str:
    """repr of a foreign value, cut so that a message stays readable."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
