"""aiperf's AgentX scenario on two servers behind the router, all of them processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.serving.router.fake import wait_for

# Its dependencies are not those of this environment: where the program is, if not on the path.
AIPERF = os.environ.get("AIPERF", "aiperf")
START_S = 600.0  # to compile on a busy machine
MINI = str(ROOT / "checkpoints" / "mini")
SERVER = "serving.server", "--checkpoint", MINI, "--port=0", "--max-running=4", "--chunk=256"


@contextmanager
def listening(log: Path, *command: str) -> Iterator[str]:
    """The URL of a process that says it is listening."""
    with log.open("w+") as said:
        full = [sys.executable, "-m", *command]
        with subprocess.Popen(full, cwd=ROOT, stderr=said) as process:
            try:
                yield _announced(process, log)
            finally:
                process.kill()


def _announced(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("listening on"):
                return line.split()[2]
        time.sleep(0.1)
    pytest.fail(f"it does not listen: {log.read_text()[-2000:]}")


def states(url: str) -> Iterable[str]:
    return httpx.get(f"{url}/health", timeout=60).json()["workers"].values()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(AIPERF) is None, reason=f"{AIPERF} is not installed")
def test_no_request_fails(tmp_path, compiled_once):
    """And agents come back to the worker that has their prompt."""
    events = "--kv-events=tcp://127.0.0.1:0", "--max-model-len=4096", "--no-prompt-logprobs"
    with ExitStack() as running:
        workers = [
            running.enter_context(listening(tmp_path / name, *SERVER, *events))
            for name in ("first", "second")
        ]
        front = "serving.router", "--port=0", "--policy=own", "--checkpoint", MINI
        named = [f"--worker={url}" for url in workers]
        url = running.enter_context(listening(tmp_path / "router", *front, *named))
        wait_for(lambda: list(states(url)) == ["up", "up"])
        load = [sys.executable, "-m", "serving.bench", "agentx", "--url", url, "--checkpoint", MINI]
        load += ["--aiperf", AIPERF, "--seconds=30", "--concurrency=3", "--out", str(tmp_path)]
        load += ["--json", str(tmp_path / "rows.json")]
        done = subprocess.run(load, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["requests"] >= 10
    assert row["cached_tokens"] > 0.2 * row["prompt_tokens"]
