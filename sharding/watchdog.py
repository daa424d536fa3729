"""A bound on how long a step may take: a stuck collective ends with an error, not with silence."""

import threading
from contextlib import suppress
from typing import Any

import jax


class StuckStep(RuntimeError):
    """A step that did not end in time; its devices may never answer again."""


class Watchdog:
    """Waits for the results of steps, each at most ``seconds``."""

    def __init__(self, seconds: float):
        if seconds <= 0:
            raise ValueError(f"{seconds=} must be above 0")
        self.seconds = seconds

    def wait(self, results: Any, step: str) -> None:
        """Return when every array of a pytree is ready; StuckStep that names the step, this process
        and its ranks (positions in the mesh) that have not finished.

        The waiting thread is left behind when that happens: nothing can interrupt a device.
        """
        ended = threading.Event()

        def block() -> None:
            # Whoever reads the results meets the same error.
            with suppress(Exception):
                jax.block_until_ready(results)
            ended.set()

        threading.Thread(target=block, daemon=True, name=f"wait for {step}").start()
        if not ended.wait(self.seconds):
            ranks = ", ".join(map(str, unfinished_ranks(results)))
            raise StuckStep(
                f"step {step} has not ended after {self.seconds:g} s: process"
                f" {jax.process_index()} waits for rank {ranks}"
            )


def unfinished_ranks(results: Any) -> list[int]:
    """Ranks of this process, by position in the mesh, with an array that is not ready."""
    waiting = set()
    for array in jax.tree.leaves(results):
        order = {device: i for i, device in enumerate(array.sharding.mesh.devices.flat)}
        for shard in array.addressable_shards:
            if not shard.data.is_ready():
                waiting.add(order[shard.device])
    return sorted(waiting)
