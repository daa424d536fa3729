"""All studies of a checkpoint, one after the other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41_jax.errors import UserError
from pallas_kernels.numerics import Numerics
from serving.generate import Loaded
from serving.quality.drafts import DraftStudy
from serving.quality.needle import Needle, needles, recalls
from serving.quality.report import Report
from serving.quality.scorer import Scorer
from serving.quality.statistics import estimate
from serving.quality.studies import Progress, Sweep, accuracy, replay_rows, variant_row, whole
from serving.quality.tasks import Task, run_tasks
from serving.quality.text import Piece, pieces
from serving.quality.variants import variants

TEXT_STUDIES = "replay", "variants"
STUDIES = "replay", "variants", "needle", "drafts", "tasks"
TEMPERATURES = 0.0, 1.0


@dataclass(frozen=True)
class Sizes:
    """pieces of text, their longest prompt ``context`` (None: 2048 tokens, or what the positions
    leave), requests at a time. needles of every length, from ``needle_windows`` windows on.
    drafting prompts and new tokens of each. task_tokens: see ``run_tasks``.
    """

    pieces: int = 16
    context: int | None = None
    requests: int = 8
    needles: int = 1
    needle_windows: int = 5
    drafting: int = 12
    new_tokens: int = 64
    task_tokens: int | None = None


FULL = Sizes()
QUICK = Sizes(pieces=2, needles=1, needle_windows=2, drafting=2, new_tokens=8)


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is loaded in some numerics, and what to measure it with."""

    checkpoint: str
    loaded: Loaded
    numerics: Numerics
    kernels: str
    text: str
    sizes: Sizes
    tasks: Sequence[Task] = ()

    @property
    def window(self) -> int:
        return self.loaded.model.cfg.sliding_window

    @property
    def context(self) -> int:
        """The longest prompt; a window of tokens behind it is scored. UserError if it does not fit
        the positions, or is too short for a replay.
        """
        window, limit = self.window, self.loaded.model.cfg.max_position_embeddings
        context = self.sizes.context or min(2048, limit - window)
        if not 3 * window <= context <= limit - window:
            rule = f"must be between {3 * window} and {limit - window}"
            raise UserError(f"--context {context} {rule} (windows of {window} tokens)")
        return context

    @property
    def length(self) -> int:
        """Of a piece."""
        return self.context + self.window


def measure(subject: Subject, studies: Sequence[str], progress: Progress) -> Report:
    """UserError, before anything runs, where the text is too short."""
    began, sizes = (time.perf_counter(), time.process_time()), subject.sizes
    count = max(sizes.pieces, sizes.drafting)
    own = pieces(subject.text, subject.loaded.tokenizer, subject.length, count)
    text = own[: sizes.pieces]
    report, scorer = Report(_about(subject, text)), _scorer(subject)
    hidden = _needles(subject, text) if "needle" in studies else []
    if set(TEXT_STUDIES) & set(studies):
        _on_text(subject, scorer, text, studies, report, progress)
    if hidden:
        report.recalls = recalls(scorer, hidden, lambda line: progress(f"needle: {line}"))
    if "drafts" in studies and subject.loaded.model.mtp:
        progress("drafts: compiling")
        prompt = min(4 * subject.window, subject.context)
        study = DraftStudy(subject.loaded, own[: sizes.drafting], prompt, sizes.new_tokens)
        for temperature in TEMPERATURES:
            progress(f"drafts at temperature {temperature:g}")
            report.drafts.append(study.run(temperature))
    if "tasks" in studies and subject.tasks:
        report.tasks = run_tasks(subject.loaded, subject.tasks, sizes.task_tokens, progress)
    report.about["seconds"] = time.perf_counter() - began[0]
    report.about["cpu_seconds"] = time.process_time() - began[1]
    return report


def _on_text(
    subject: Subject,
    scorer: Scorer,
    text: Sequence[Piece],
    studies: Sequence[str],
    report: Report,
    progress: Progress,
) -> None:
    exact = whole(scorer, text, lambda line: progress(f"exact: {line}"))
    nats = np.concatenate([score.nats for score in exact])
    right, clusters = accuracy(exact, text)
    report.nats, report.right = estimate(nats, clusters), estimate(right, clusters)
    if "replay" in studies:
        sweep = Sweep.of(subject.window, scorer.page, subject.context)
        found = replay_rows(scorer, text, exact, sweep, lambda line: progress(f"replay: {line}"))
        report.rows += found
    if "variants" in studies:
        loaded, numerics = subject.loaded, subject.numerics
        for variant in variants(
            subject.checkpoint, loaded.model, numerics, subject.kernels, subject.length
        ):
            name = f"{variant.study} {variant.name}"
            other = _scorer(subject, *variant.make())
            scores = whole(other, text, lambda line, name=name: progress(f"{name}: {line}"))
            report.rows.append(variant_row(variant, scores, exact, text))


def _needles(subject: Subject, text: Sequence[Piece]) -> list[Needle]:
    """Prompts that leave a window for their answers."""
    window, sizes = subject.window, subject.sizes
    start = min(sizes.needle_windows * window, subject.length - 2 * window)
    return needles(subject.loaded.tokenizer, text, start, window, sizes.needles)


def _scorer(subject: Subject, *variant) -> Scorer:
    model, ops = variant or (subject.loaded.model, subject.loaded.ops)
    return Scorer(model, ops, requests=subject.sizes.requests, length=subject.length)


def _about(subject: Subject, text: Sequence[Piece]) -> dict:
    return {
        "checkpoint": subject.checkpoint,
        "numerics": subject.numerics.name,
        "text": subject.text,
        "pieces": len(text),
        "length": subject.length,
        "clusters": len({piece.cluster for piece in text}),
        "window": subject.window,
    }
