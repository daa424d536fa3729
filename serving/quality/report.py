"""The report: tables for people, JSON for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.quality.compare import Row
from serving.quality.drafts import Acceptance
from serving.quality.needle import Recall
from serving.quality.statistics import Estimate
from serving.quality.tasks import TaskResult


@dataclass
class Report:
    """about: the checkpoint, text and sizes. nats, right: of the exact model on the text, a token,
    and how often its likeliest id is the text's.
    """

    about: dict[str, Any]
    nats: Estimate | None = None
    right: Estimate | None = None
    rows: list[Row] = field(default_factory=list)
    recalls: list[Recall] = field(default_factory=list)
    drafts: list[Acceptance] = field(default_factory=list)
    tasks: TaskResult | None = None

    def document(self) -> dict[str, Any]:
        """What JSON holds: NaN, the error of one cluster, is null."""
        return _finite(asdict(self))


def as_text(report: Report) -> str:
    """Tables with every mean beside its standard error."""
    about, parts = report.about, []
    parts.append(
        f"{about['checkpoint']}: numerics {about['numerics']}; {about['text']}: {about['pieces']} "
        f"pieces of {about['length']} tokens, {about['clusters']} clusters; "
        f"{about['seconds']:.0f} s ({about['cpu_seconds']:.0f} s of CPU)\n"
        "Every ± is a standard error over clusters; differences are paired, token by token."
    )
    if report.nats and report.right:
        parts.append(
            f"exact: {report.nats.count} tokens, perplexity {_perplexity(report.nats)}, "
            f"{_percent(report.right)} % of next tokens right"
        )
    if report.rows:
        parts.append(_comparisons(report.rows))
    if report.recalls:
        parts.append(_needle(report.recalls))
    parts += [_drafts(own) for own in report.drafts]
    if report.tasks:
        t = report.tasks
        parts.append(
            f"tasks: {t.replayed.count}, solved with replay {_percent(t.replayed)} %, without "
            f"{_percent(t.exact)} %, difference {_percent(t.difference, sign=True)}"
        )
    return "\n\n".join(parts)


def _comparisons(rows: Sequence[Row]) -> str:
    head = ["study", "variant", "condition", "tokens", "perplexity", "exact"]
    head += ["difference, 0.001 nats", "in errors", "agreement, %"]
    return _table(
        [
            head,
            *(
                [
                    *(row.study, row.variant, row.condition, str(row.nats.count)),
                    f"{math.exp(row.nats.mean):.4f}",
                    f"{math.exp(row.exact.mean):.4f}",
                    _pm(1e3 * row.difference.mean, 1e3 * row.difference.error, sign=True),
                    f"{row.difference.z:+.1f}",
                    _percent(row.agreement),
                ]
                for row in rows
            ),
        ]
    )


def _needle(recalls: Sequence[Recall]) -> str:
    head = ["needle", "prompts", "recalled, %", "exact, %", "difference"]
    head += ["nats a token", "exact", "at first mention"]
    shown = [r for r in recalls if not r.condition.startswith("residue")]
    residues = [r for r in recalls if r.condition.startswith("residue")]
    table = _table(
        [
            head,
            *(
                [
                    *(r.condition, str(r.recalled.count), _percent(r.recalled), _percent(r.exact)),
                    _percent(r.difference, sign=True),
                    _pm(r.nats.mean, r.nats.error),
                    _pm(r.exact_nats.mean, r.exact_nats.error),
                    _pm(r.first_nats.mean, r.first_nats.error),
                ]
                for r in shown
            ),
        ]
    )
    worst = min(residues, key=lambda r: r.difference.mean)
    lost = sum(r.difference.mean < 0 for r in residues)
    won = sum(r.difference.mean > 0 for r in residues)
    return (
        f"{table}\n{len(residues)} residues of the prompt's length: recall is lower with replay at "
        f"{lost}, higher at {won}; largest loss {-100 * worst.difference.mean:.0f} points of "
        f"{worst.recalled.count} prompts, {worst.condition}"
    )


def _drafts(own: Acceptance) -> str:
    places = range(1, len(own.by_position) + 1)
    rows = [
        [f"drafts at temperature {own.temperature:g}", *(f"draft {place}" for place in places)],
        ["accepted where all before were, %", *map(_percent, own.by_position)],
        ["accepted of those verified, %", *map(_percent, own.whole)],
    ]
    tokens = _pm(own.tokens.mean, own.tokens.error)
    return f"{_table(rows)}\n{own.tokens.count} steps, {tokens} tokens a step"


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _perplexity(nats: Estimate) -> str:
    mean = math.exp(nats.mean)
    return _pm(mean, mean * nats.error)


def _percent(share: Estimate, *, sign: bool = False) -> str:
    return _pm(100 * share.mean, 100 * share.error, sign=sign)


def _pm(mean: float, error: float, *, sign: bool = False) -> str:
    return f"{mean:{'+' * sign}.2f} ± {error:.2f}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
