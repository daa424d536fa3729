"""What `inspect` says about a checkpoint or a preset."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv41_jax.checkpoint.census import take_census
from dsv41_jax.checkpoint.fit import fit_report
from dsv41_jax.checkpoint.inventory import TensorSpec, Totals, inventory
from dsv41_jax.checkpoint.orbax import is_orbax, read_orbax
from dsv41_jax.checkpoint.parameters import parameters
from dsv41_jax.checkpoint.read import read_config
from dsv41_jax.checkpoint.safetensors_files import TensorFiles
from dsv41_jax.config import Config

_NOTHING_WRONG = {"missing": [], "unreadable": [], "unknown": [], "problems": []}


def report_preset(name: str) -> dict[str, Any]:
    """The inventory that a preset's config implies."""
    cfg = Config.preset(name)
    specs = inventory(cfg)
    return _report(f"preset {name}", cfg, specs) | _NOTHING_WRONG


def report_directory(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint directory holds and what is wrong with it; reads headers only.

    `problems` are the reasons not to load it; `missing` also lists draft and vision tensors,
    `unreadable` what the index places in missing or damaged files.
    """
    directory = Path(directory)
    cfg = read_config(directory)
    if is_orbax(directory):
        return _report_orbax(directory, cfg)
    files = TensorFiles(directory)
    census = take_census(files, cfg)
    return _report(str(directory), cfg, census.present) | {
        "missing": [name for names in census.missing.values() for name in names],
        "unreadable": sorted(files.damaged),
        "unknown": census.unknown,
        "problems": census.problems(speculation=False),
    }


def _report_orbax(directory: Path, cfg: Config) -> dict[str, Any]:
    held = read_orbax(directory)
    plan = parameters(inventory(cfg))
    specs = {name: spec for path in held for name, spec in plan[path].tensors()}
    missing = [path for path in plan if path not in held]
    report = _report(f"{directory} (Orbax)", cfg, specs)
    return report | _NOTHING_WRONG | {"missing": missing}


def _report(subject: str, cfg: Config, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for spec in specs.values():
        dtypes[spec.dtype] += spec.nbytes
    return {
        "subject": subject,
        **asdict(Totals.of(specs.values())),
        "parts": {part: asdict(_part_totals(specs, part)) for part in ("text", "mtp", "vision")},
        "bytes_by_dtype": dict(sorted(dtypes.items())),
        **fit_report(cfg, specs),
    }


def _part_totals(specs: Mapping[str, TensorSpec], part: str) -> Totals:
    return Totals.of(spec for spec in specs.values() if spec.part == part)


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        report["subject"],
        f"  {report['tensors']:,} tensors, {report['parameters']:,} parameters, "
        f"{report['nbytes']:,} bytes",
    ]
    for part, totals in report["parts"].items():
        lines.append(
            f"  {part + ':':8}{totals['tensors']:>8,} tensors {totals['nbytes']:>18,} bytes"
        )
    lines.append("bytes by stored dtype")
    lines += [f"  {name + ':':14}{n:>18,}" for name, n in report["bytes_by_dtype"].items()]
    lines.append("bytes in memory by kind")
    lines += [f"  {name + ':':14}{n:>18,}" for name, n in report["bytes_by_kind"].items()]
    for label in ("missing", "unreadable", "unknown"):
        names = report[label]
        lines.append(f"{label}: {_named(names) if names else 'none'}")
    lines.append(f"what fits where ({report['assumptions']})")
    lines += [f"  {fit['line']}" for fit in report["fits"]]
    return "\n".join(lines)


def _named(names: list[str], shown: int = 10) -> str:
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return f"{len(names):,}: {', '.join(names[:shown])}{more}"
