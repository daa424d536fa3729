"""Runs the tests under ``devices/`` on simulated devices: their number is fixed when JAX starts, so
they need processes of their own.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "devices"
CHECKS = sorted(path.name for path in FOLDER.glob("check_*.py"))
SLOW = {"check_data_ranks.py", "check_forward.py", "check_kv_pool.py", "check_wide.py"}


def start(devices: int, *arguments: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen) -> str:
    with process:
        text = process.communicate(timeout=3600)[0]
    assert process.returncode == 0, text[-8000:]
    return text


def run_checks(check: str, marker: str, devices: int = 8) -> None:
    options = ["-n0", "-q", "-p", "no:cacheprovider", "-m", marker]
    assert " passed" in output_of(start(devices, "pytest", *options, str(FOLDER / check)))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("check", sorted(set(CHECKS) - SLOW))
def test_on_eight_devices(check):
    run_checks(check, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_more_on_eight_devices(check):
    run_checks(check, "slow")


@pytest.mark.slow
def test_wide_expert_parallelism():
    """More ranks than experts: the last ones hold padding."""
    module = "tests.sharding.devices.one_process"
    assert "rows on 16 devices" in output_of(start(16, module, "dep16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp8", "dep8"])
def test_two_processes_of_four_devices(name):
    port = free_port()
    module = "tests.sharding.devices.one_process"
    processes = [start(4, module, name, str(i), "2", port) for i in range(2)]
    for i, process in enumerate(processes):
        assert f"process {i} compared" in output_of(process)


@pytest.mark.slow
def test_one_command_in_two_processes():
    """Rank 1 of dep8 lies in the other process; both read what the request's rank samples."""
    with np.load(ROOT / "tests" / "goldens" / "replay_fp32.npz") as file:
        prompt, want = file["p5.input_ids"].tolist(), file["p5.decoder.tokens"].tolist()
    command = ["serving.generate", "--checkpoint", "tests/goldens/tiny_ckpt", "--json"]
    command += ["--layout", "dep8", "--numerics", "float32", "--ignore-eos", "--page-size", "16"]
    command += ["--token-ids", ",".join(map(str, prompt)), "--max-new-tokens", str(len(want))]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id"]
    processes = [start(4, *command, str(i)) for i in range(2)]
    report, other = (output_of(process) for process in processes)
    assert json.loads(report.splitlines()[-1])["token_ids"] == want
    assert '"token_ids"' not in other


@pytest.mark.slow
def test_a_sweep_measures_over_processes(tmp_path):
    path = tmp_path / "sweep.json"
    command = ["sharding.sweep", "--preset", "tiny", "--devices", "4", "--layouts", "tp4,dep4"]
    command += ["--batch", "4", "--context", "32", "--measure", "--json", str(path)]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id"]
    processes = [start(2, *command, str(i)) for i in range(2)]
    table, other = (output_of(process) for process in processes)
    rows = json.loads(path.read_text())["rows"]
    assert [row["layout"] for row in rows] == ["tp4", "dep4"]
    assert all(row["step_us_measured"] > 0 and row["collectives"] for row in rows)
    assert "measured ms" in table and "measured ms" not in other
