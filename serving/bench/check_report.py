"""What ``check`` prints and writes, as it comes."""

from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from typing import Any

from serving.bench.check_compare import Tolerance, Value
from serving.bench.check_goldens import Agreement, Bounds
from serving.bench.check_implementations import Implementation, merged
from serving.bench.forward_cases import Case
from serving.bench.forward_report import write_rows
from serving.buckets import Bucket

_SHOWN = {True: "ok  ", False: "FAIL", None: "    "}


class Report:
    """Lines on standard output and the rows of a file, which is whole after each of its methods."""

    def __init__(self, json: str | None, heading: str, kernels: str):
        self.json, self.heading, self.kernels, self.failed = json, heading, kernels, 0
        self.rows: list[dict[str, Any]] = []
        self.implementations: list[list[Implementation]] = []
        print(heading, flush=True)
        self._write("unfinished")

    def case(self, case: Case, limit: Tolerance, values: Iterable[Value]) -> None:
        print(f"{case.key}: {limit}", flush=True)
        for value in values:
            self._value(case.key, value, value.within(limit))
        self._write("unfinished")

    def golden(self, numerics: str, values: Iterable[Agreement], bounds: Bounds | None) -> None:
        """Logits of the goldens' prompts; without bounds they are only shown."""
        print(f"goldens, {numerics} numerics: {bounds or 'no bounds'}", flush=True)
        for value in values:
            ok = None if bounds is None else value.within(bounds)
            self._value(f"goldens, {numerics} numerics", value, ok)
        self._write("unfinished")

    def program(self, name: str, bucket: Bucket, found: list[Implementation]) -> None:
        shape = f"{name} {bucket.requests} x {bucket.rows}"
        calls, by_kernel = sum(one.calls for one in found), sum(one.by_kernel for one in found)
        ran = ", ".join(one.op for one in found if one.by_kernel) or "none"
        print(f"  {shape}: {by_kernel} of {calls} calls by kernels: {ran}", flush=True)
        self.implementations.append(found)
        self.rows += [{"kind": "implementation", "program": shape, **asdict(one)} for one in found]
        self._write("unfinished")

    def finish(self) -> int:
        """How many values are outside their limits."""
        every = merged(self.implementations)
        print(f"implementations of {self.kernels}, calls in all programs:")
        for one in every:
            print("\n".join(f"  {line}" for line in str(one).splitlines()))
        if not any(one.by_kernel for one in every):
            print("no kernel ran on this device: the reference was compared with itself")
        print(f"{self.failed} values are outside their limits", flush=True)
        self._write(f"{self.failed} values are outside their limits")
        return self.failed

    def _value(self, case: str, value: Value | Agreement, ok: bool | None) -> None:
        self.failed += ok is False
        print(f"  {_SHOWN[ok]} {value}", flush=True)
        numbers = {key: _number(number) for key, number in asdict(value).items()}
        self.rows.append({"kind": "value", "case": case, **numbers, "within": ok})

    def _write(self, state: str) -> None:
        write_rows(self.json, self.rows, [self.heading, state])


def _number(value: Any) -> Any:
    """JSON has no infinity."""
    return value if not isinstance(value, float) or isfinite(value) else str(value)
