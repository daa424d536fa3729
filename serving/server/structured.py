"""Structured output: from a body's fields to a compiled grammar."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv41_jax.errors import UserError
from serving.grammar import Grammar
from serving.server.errors import ApiError
from serving.server.protocol import ChatBody, GenerationBody, StructuredOutputs

if TYPE_CHECKING:
    from serving.grammars import Grammars

Make = Callable[["Grammars"], Grammar]
_FORMAT = "response_format"


def grammar_of(body: GenerationBody, grammars: "Grammars | None") -> Grammar | None:
    """What the answer must match, compiled; None for any text. ApiError 400 naming the field."""
    wanted = [*_asked_by_chat(body), *_asked_by_options(body.structured_outputs)]
    if not wanted:
        return None
    field, make = wanted[0]
    if len(wanted) > 1:
        rule = f"cannot be combined with {wanted[1][0]}"
        raise ApiError(400, f"{field}: {rule}", field)
    if isinstance(body, ChatBody):
        _check_chat(body, field)
    if grammars is None:
        raise ApiError(400, f"{field}: this server does not constrain the output", field)
    try:
        return make(grammars)
    except UserError as error:
        raise ApiError(400, str(error).replace("grammar", field, 1), field) from None


def _asked_by_chat(body: GenerationBody) -> list[tuple[str, Make]]:
    asked = body.response_format if isinstance(body, ChatBody) else None
    if asked is None:
        return []
    schema = asked.json_schema
    if (asked.type == "json_schema") != (schema is not None):
        rule = "goes with type json_schema, and only with it"
        raise ApiError(400, f"{_FORMAT}.json_schema: {rule}", f"{_FORMAT}.json_schema")
    if schema is not None:
        of_schema = schema.schema
        return [(f"{_FORMAT}.json_schema.schema", lambda made: made.json_schema(of_schema))]
    return [(_FORMAT, lambda made: made.json_object())] if asked.type == "json_object" else []


def _asked_by_options(asked: StructuredOutputs | None) -> list[tuple[str, Make]]:
    if asked is None:
        return []
    schema, regex, choice, lark = asked.json, asked.regex, asked.choice, asked.grammar
    made: list[tuple[str, Make]] = []
    if schema is not None:
        made.append(("json", lambda grammars: grammars.json_schema(schema)))
    if regex is not None:
        made.append(("regex", lambda grammars: grammars.regex(regex)))
    if choice is not None:
        made.append(("choice", lambda grammars: grammars.choice(choice)))
    if lark is not None:
        made.append(("grammar", lambda grammars: grammars.lark(lark)))
    if asked.json_object:
        made.append(("json_object", lambda grammars: grammars.json_object()))
    if not made:
        rule = "must hold one of json, regex, choice, grammar and json_object"
        raise ApiError(400, f"structured_outputs: {rule}", "structured_outputs")
    return [(f"structured_outputs.{name}", make) for name, make in made]


def _check_chat(body: ChatBody, field: str) -> None:
    """ApiError 400 for what else an answer would hold than the text that has to match."""
    if body.tools and body.tool_choice != "none":
        raise ApiError(400, f"{field}: cannot be combined with tools that may be called", field)
    if body.messages and body.messages[-1].prefix:
        raise ApiError(400, f"{field}: cannot be combined with a prefix to go on from", field)
