"""Runs the tests under ``devices/`` on simulated devices: their number is fixed when JAX starts, so
they need processes of their own.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "devices"
CHECKS = sorted(path.name for path in FOLDER.glob("check_*.py"))
SLOW = {"check_wide.py"}


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    module = "tests.sharding.devices.one_process"
    processes = [start(4, module, name, str(i), "2", port) for i in range(2)]
    for i, process in enumerate(processes):
        assert f"process {i} compared" in output_of(process)
