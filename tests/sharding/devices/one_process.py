"""One process of several that run a layout together: the golden requests, each process comparing
what its own devices hold.

python -m tests.sharding.devices.one_process LAYOUT [PROCESS PROCESSES PORT]
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from tests.sharding.devices.support import Placed, run_goldens


def main(name: str, process: str = "0", processes: str = "1", port: str = "") -> None:
    if port:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    placed = Placed.of(name)
    assert (jax.process_index(), jax.process_count()) == (int(process), int(processes))
    compared = run_goldens(placed)
    assert compared > 100
    print(f"process {process} compared {compared} rows on {jax.local_device_count()} devices")


if __name__ == "__main__":
    main(*sys.argv[1:])
