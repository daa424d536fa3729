"""Any task set: a JSON object a line, ``prompt`` and ``answer``, or GSM8K's ``question`` and
``answer``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv41_jax.errors import UserError
from dsv41_jax.prompt import prompt_ids, read_text
from serving.engine import Engine
from serving.generate import Loaded
from serving.options import EngineOptions
from serving.quality.statistics import Estimate, estimate
from serving.quality.studies import Progress
from serving.request import Request, check_request

SLOTS = 8
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FINAL = "####"


@dataclass(frozen=True)
class Task:
    """number: the answer is the last number of the text, as GSM8K's answers end."""

    prompt: str
    answer: str
    number: bool

    def solved(self, text: str) -> bool:
        """Whether a continuation gives the answer: as its number, or as its first words."""
        if not self.number:
            begins, rest = _split(text.strip(), self.answer.strip())
            return begins and not rest[:1].isalnum()
        before, mark, behind = text.partition(_FINAL)
        found = _NUMBER.findall(behind)[:1] if mark else _NUMBER.findall(before)[-1:]
        return [_value(number) for number in found] == [_value(self.answer)]


@dataclass(frozen=True)
class TaskResult:
    """Share of tasks solved with replay and without, and the paired difference."""

    replayed: Estimate
    exact: Estimate
    difference: Estimate


def read_tasks(path: str) -> list[Task]:
    """UserError that names the line and what is wrong with it."""
    tasks = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            tasks.append(_task(line, f"{path}: line {number}"))
    if not tasks:
        raise UserError(f"{path}: must hold at least one task")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}") from None
    fields = found if isinstance(found, dict) else {}
    prompt, question, answer = (fields.get(name) for name in ("prompt", "question", "answer"))
    if not isinstance(answer, str) or not answer.strip():
        raise UserError(f"{where}: answer must be a text")
    if isinstance(prompt, str) and question is None:
        return Task(prompt, answer, number=False)
    if isinstance(question, str) and prompt is None:
        final = answer.partition(_FINAL)[2].strip()
        if not _NUMBER.fullmatch(final):
            raise UserError(f"{where}: answer must end in {_FINAL} and a number")
        return Task(f"Question: {question}\nAnswer:", final, number=True)
    raise UserError(f"{where}: must have either prompt or question, a text")


def _split(text: str, answer: str) -> tuple[bool, str]:
    return text.startswith(answer), text[len(answer) :]


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def run_tasks(
    loaded: Loaded, tasks: Sequence[Task], new: int | None, progress: Progress
) -> TaskResult:
    """Greedy continuations with bounded replay on and off. new: tokens generated at most; None: as
    many as the longest answer has, and 8 more, or 256 for numbers.
    """
    requests = [_request(loaded, task, new) for task in tasks]
    executables: dict = {}
    shares = []
    for replay in (True, False):
        progress(f"{len(tasks)} tasks, replay {'on' if replay else 'off'}")
        engine = _engine(loaded, requests, replay, executables)
        sequences = engine.run(requests)
        texts = [loaded.tokenizer.decode(s.result.token_ids, skip_special=True) for s in sequences]
        shares.append(np.array([t.solved(x) for t, x in zip(tasks, texts, strict=True)], float))
    own, (on, off) = np.arange(len(tasks)), shares
    return TaskResult(estimate(on, own), estimate(off, own), estimate(on - off, own))


def _request(loaded: Loaded, task: Task, new: int | None) -> Request:
    cfg = loaded.model.cfg
    if new is None:
        answer = len(loaded.tokenizer.encode(task.answer, bos=False))
        new = 256 if task.number else answer + 8
    ids = prompt_ids(loaded.tokenizer, task.prompt)
    new = max(1, min(new, cfg.max_position_embeddings - len(ids)))
    request = Request(tuple(ids), new, stop_ids=(cfg.eos_token_id,))
    check_request(request, cfg)
    return request


def _engine(loaded: Loaded, requests: Sequence[Request], replay: bool, executables: dict) -> Engine:
    window = loaded.model.cfg.sliding_window
    page = window + window % 2
    total = max(len(r.prompt) + r.max_new_tokens for r in requests)
    options = EngineOptions(
        slots=SLOTS,
        pages=SLOTS * -(-total // page),
        page_size=page,
        max_tokens=total,
        prefill=((SLOTS, window),),
        decode=(SLOTS,),
        replay=replay,
        prefix_cache=False,
        logprobs=0,
        prompt_logprobs=False,
    )
    engine = Engine(loaded.model, loaded.ops, options, executables=executables)
    engine.warm_up()
    return engine
