"""A Mooncake master and owners of memory as child processes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsv41_jax.errors import UserError
from serving.kv_pool.mooncake import mooncake_class, reachable

_START_S = 30.0
_END_S = 5.0


@dataclass(frozen=True)
class ClusterOptions:
    """capacity: bytes of each of ``owners``. host: address that others reach them at. port: of the
    master, 0 takes a free one. lease_s: must be longer than the slowest read of a batch.
    """

    capacity: int
    owners: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    lease_s: float = 10.0


class Cluster:
    """Running processes: ``master`` and ``owners``. End it, or use it in a ``with``.

    Mooncake's data ports listen on every address of the host, whatever ``host`` says.
    """

    def __init__(self, options: ClusterOptions):
        """UserError if a process does not come up; what it wrote is in the message."""
        mooncake_class()
        self.options = options
        self.port = options.port or _free_port(options.host)
        self._metrics = _free_port("127.0.0.1")
        self._folder = tempfile.TemporaryDirectory(prefix="dsv41-pool-")
        self.owners: list[subprocess.Popen] = []
        try:
            self.master = self.start_master()
            for _ in range(options.owners):
                self.owners.append(self.start_owner())
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{self.options.host}:{self.port}"

    def start_master(self) -> subprocess.Popen:
        """A new master in place of one that died; it knows nothing of what the owners hold."""
        lease = f"--default_kv_lease_ttl={round(1000 * self.options.lease_s)}"
        arguments = [f"--rpc_address={self.options.host}", f"--rpc_port={self.port}", lease]
        arguments += ["--metrics_host=127.0.0.1", f"--metrics_port={self._metrics}"]
        self.master = self._start("master", "mooncake.cli", arguments)
        self._await("master", self.master, lambda: reachable(self.address, 0))
        return self.master

    def start_owner(self) -> subprocess.Popen:
        """One more owner, known to the master."""
        before = self._segments()
        arguments = [f"--host={self.options.host}", "--protocol=tcp"]
        arguments += [f"--port={_free_port(self.options.host)}", "--metadata_server=P2PHANDSHAKE"]
        arguments += [f"--global_segment_size={self.options.capacity} B"]
        arguments += [f"--master_server_address={self.address}"]
        owner = self._start("owner", "mooncake.cli_client", arguments)
        self._await("owner", owner, lambda: self._segments() > before)
        return owner

    @property
    def ended(self) -> str | None:
        """A process that has ended by itself."""
        return next((name for name, one in self._processes() if one.poll() is not None), None)

    def close(self) -> None:
        """End all processes."""
        for _, process in self._processes():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for _, process in self._processes():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _processes(self) -> list[tuple[str, subprocess.Popen]]:
        owners = [(f"owner {number}", owner) for number, owner in enumerate(self.owners)]
        return owners + ([("master", self.master)] if hasattr(self, "master") else [])

    def _start(self, name: str, module: str, arguments: list[str]) -> subprocess.Popen:
        command = [sys.executable, "-m", module, *arguments, "--logtostderr=true"]
        with self._log(name).open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _await(self, name: str, process: subprocess.Popen, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                said = self._log(name).read_text("utf-8", "replace").strip().splitlines()[-3:]
                process.kill()
                process.wait()
                raise UserError(f"mooncake: the {name} does not come up: {' / '.join(said)}")
            time.sleep(0.02)

    def _segments(self) -> int:
        """Owners that the master knows."""
        url = f"http://127.0.0.1:{self._metrics}/get_all_segments"
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return len(answer.read().split())
        return 0


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]
