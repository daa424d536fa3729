"""Frozen dataclasses from plain values, with everything that is wrong named at once."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def build(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """A dataclass of plain values, problems noted instead of raised."""
    if not isinstance(value, Mapping):
        problems.append(f"{path or 'document'}: must be an object")
        return None
    known = {each.name: each for each in fields(kind)}
    prefix = f"{path}." if path else ""
    problems += [f"{prefix}{name}: is unknown" for name in value if name not in known]
    built = {}
    for name in known:
        if name in value:
            built[name] = _value(_hints(kind)[name], value[name], prefix + name, problems)
    required = {
        each.name
        for each in known.values()
        if each.default is MISSING and each.default_factory is MISSING
    }
    missing = required - set(value)
    problems += [f"{prefix}{name}: is missing" for name in sorted(missing)]
    return None if missing else kind(**built)


def _value(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    if is_dataclass(hint):
        return build(hint, value, path, problems)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if not isinstance(value, list | tuple):
            problems.append(f"{path}: must be a list")
            return ()
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            problems.append(f"{path}: must have {len(kinds)} values")
            return ()
        return tuple(
            _value(kind, each, f"{path}[{i}]", problems)
            for i, (kind, each) in enumerate(zip(kinds, value, strict=True))
        )
    if get_origin(hint) is not None:
        if not isinstance(value, Mapping):
            problems.append(f"{path}: must be an object")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        problems.append(f"{path}: {value!r} must be a {hint.__name__}")
    return value
