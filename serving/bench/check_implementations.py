"""Which operations of a traced program run kernels, and why the others do not."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax

from dsv41_jax.ops import Ops
from serving.bench.check_reasons import reason

_SCOPE = re.compile(r"checked_(\d+)")
_LAUNCHES = {"core_map", "mpmd_map", "pallas_call"}  # what JAX calls a kernel before it is lowered


@dataclass
class Record:
    """Operation and why it should run no kernel ("" if it should), by number of the call."""

    calls: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Implementation:
    """Of an operation in a program: calls, those that launch kernels, which, and how many of the
    others there are for each reason.
    """

    op: str
    calls: int
    by_kernel: int
    kernels: dict[str, int]
    reasons: dict[str, int]

    def __str__(self) -> str:
        names = f" ({', '.join(self.kernels)})" if self.kernels else ""
        lines = [f"{self.op}: {self.by_kernel} of {self.calls} calls by kernels{names}"]
        lines += [f"  {count}: {why}" for why, count in self.reasons.items()]
        return "\n".join(lines)


def recorded(ops: Ops, record: Record) -> Ops:
    """The operations; each call is noted and marks what it traces."""
    names = [f.name for f in fields(ops) if f.name not in ("numerics", "agree", "anywhere")]
    run = {name: getattr(ops, name) for name in names}
    return replace(
        ops,
        **{
            name: partial(_recorded, record, ops, name, op)
            for name, op in run.items()
            if op is not None
        },
    )


def _recorded(
    record: Record, ops: Ops, name: str, op: Callable, *arguments: Any, **options: Any
) -> Any:
    number = len(record.calls)
    record.calls.append((name, reason(name, ops.numerics, arguments, options)))
    with jax.named_scope(f"checked_{number}"):
        return op(*arguments, **options)


def implementations(record: Record, jaxpr: Any) -> list[Implementation]:
    """Of every recorded operation that the program still calls, by name."""
    found: dict[int, Counter] = {}
    for number, kernel in _launches(jaxpr, None):
        found.setdefault(number, Counter()).update([kernel] if kernel else [])
    by_op: dict[str, list[int]] = {}
    for number in sorted(found):
        by_op.setdefault(record.calls[number][0], []).append(number)
    return [_of_op(op, by_op[op], record, found) for op in sorted(by_op)]


def _of_op(
    op: str, numbers: list[int], record: Record, found: dict[int, Counter]
) -> Implementation:
    others = [number for number in numbers if not found[number]]
    kernels = sum((found[number] for number in numbers), Counter())
    reasons = Counter(record.calls[number][1] or "fits, but runs no kernel" for number in others)
    return Implementation(
        op, len(numbers), len(numbers) - len(others), dict(kernels), dict(reasons)
    )


def merged(parts: list[list[Implementation]]) -> list[Implementation]:
    """Those of several programs together."""
    by_op: dict[str, Implementation] = {}
    for one in (each for part in parts for each in part):
        old = by_op.get(one.op, Implementation(one.op, 0, 0, {}, {}))
        by_op[one.op] = Implementation(
            one.op,
            old.calls + one.calls,
            old.by_kernel + one.by_kernel,
            dict(Counter(old.kernels) + Counter(one.kernels)),
            dict(Counter(old.reasons) + Counter(one.reasons)),
        )
    return [by_op[op] for op in sorted(by_op)]


def _launches(jaxpr: Any, outer: int | None) -> Iterator[tuple[int, str]]:
    """(call, kernel) of every launch, (call, "") of everything else that a call traced."""
    for equation in jaxpr.eqns:
        marks = _SCOPE.findall(str(equation.source_info.name_stack))
        number = int(marks[-1]) if marks else outer
        if equation.primitive.name in _LAUNCHES:
            if number is not None:
                yield number, str(equation.params.get("name") or equation.primitive.name)
            continue
        if number is not None:
            yield number, ""
        for inner in _inner(equation.params.values()):
            yield from _launches(inner, number)


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(value)
            continue
        body = getattr(value, "jaxpr", value)
        if hasattr(body, "eqns"):
            yield body
