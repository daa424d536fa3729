"""Tries grammars in a process of its own, where a crash or an endless compilation hurts nobody.

The library bounds most of its work, but a chain of references may overflow its stack and a large
``multipleOf`` takes minutes: neither may happen where requests are running.
"""

import json
import resource
import select
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TIMEOUT_S, START_S = 5.0, 60.0
_MEMORY_BYTES = 4 * 2**30
# An eighth of what the threads of the product have: what fits here fits there.
_STACK_BYTES = 2**20
_SHOWN = 300


def limits() -> LLParserLimits:
    """Bounds on the work of one grammar; a lexer state takes 1 to 2 KB."""
    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


def compiled(tokenizer: LLTokenizer, source: str) -> tuple[LLMatcher, bytes]:
    """A grammar at its beginning and the bits of the ids that may come first."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
    return matcher, b"" if matcher.is_error() else matcher.compute_bitmask()


def fault_of(matcher: LLMatcher) -> str | None:
    """What a matcher says against its grammar, on one line."""
    if not matcher.is_error():
        return None
    text = " ".join(matcher.get_error().partition("<state>")[0].split())
    return text[:_SHOWN] or "the grammar cannot be followed"


class Probe:
    """Compiles grammars for one tokenizer in a process that is started again when it has to be.

    vocabulary: the arguments of the ``LLTokenizer``.
    """

    def __init__(self, vocabulary: dict[str, Any]):
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, source: str) -> str | None:
        """Why a grammar cannot be used, None if it can; waits for its turn."""
        with self._lock:
            if not self._started():
                return "grammars cannot be compiled now"
            return self._asked(source, TIMEOUT_S)["fault"]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _started(self) -> bool:
        """Whether there is a process; starts one if the last one ended."""
        if self._process is not None and self._process.poll() is None:
            return True
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._asked(self._vocabulary, START_S)["fault"] is None

    def _asked(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """The answer to one line; if none comes, the process is ended and that is the fault."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # then the output has ended, too
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        ready = select.select([process.stdout], [], [], timeout_s)[0]
        if ready and (line := process.stdout.readline()):
            return json.loads(line)
        self._stop()
        if ready:
            return {"fault": "is nested too deeply or needs too much memory"}
        return {"fault": f"takes longer than {timeout_s:g} s to compile"}

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _serve() -> None:
    """Answer a line of vocabulary, then one line for each grammar, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    print(json.dumps({"fault": None}), flush=True)
    for line in sys.stdin:
        matcher, _ = compiled(tokenizer, json.loads(line))
        print(json.dumps({"fault": fault_of(matcher)}), flush=True)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()
