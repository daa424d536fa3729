"""Rows of Engram tables on the host, fetched by threads for each step (ARCHITECTURE 9.3 and 9.4).

Which rows a step needs follows from its tokens. Those of a prompt are known; its rows are gathered
and copied while the step before runs. A decoding step needs the tokens of the step before, so the
engine reads these first, and the drafts of its own, which it waits for.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv41_jax.engram_host import HostTables
from dsv41_jax.engram_staging import Staged, Staging, table_path, with_tables
from dsv41_jax.rows import Rows
from pallas_kernels.quant import Fp8Rows
from serving.batch import NOBODY, Segment, build_rows
from serving.buckets import Bucket
from serving.sequence import Sequence
from sharding.place import Placement

# Programs with layers that have Engram tables.
ENCODERS = "encode", "prefill_full", "prefill_scored", "decode", "verify"


class TableRows:
    """The last input of ``ENCODERS`` for their rows; none if ``host`` is None.

    ranks: data ranks. lookback: tokens before its own that a row depends on. device: where inputs
    lie, also a sharding.
    """

    def __init__(self, host: HostTables | None, *, ranks: int, lookback: int, device: Any):
        self.host, self.ranks, self.lookback, self.device = host, ranks, lookback, device
        self._staging: dict[tuple[int, int], Staging] = {}

    def of(self, rows: Rows) -> tuple[Staged, ...]:
        """Of rows on the host, of all data ranks; good until the next ones of their shape."""
        if self.host is None:
            return ()
        requests, width = rows.tokens.shape
        if (requests, width) not in self._staging:
            made = Staging(self.host, requests, width, ranks=self.ranks, device=self.device)
            self._staging[requests, width] = made
        staging = self._staging[requests, width]
        staging.start(rows)
        return (staging.take(),)

    def close(self) -> None:
        """End the threads that fetch, of the tables too."""
        for staging in self._staging.values():
            staging.close()
        if self.host is not None:
            self.host.close()

    def of_newest(
        self, bucket: Bucket, places: list[Sequence | None], drafts: Any = None
    ) -> tuple[Staged, ...]:
        """Of the newest token of each sequence and the drafts int32 [places, n] behind it. bucket:
        of the places of all ranks. All tokens so far have been read; drafts are waited for.
        """
        if self.host is None:
            return ()
        behind = np.zeros((len(places), 0), np.int32) if drafts is None else np.asarray(drafts)
        segments = [NOBODY] * len(places)
        for place, sequence in enumerate(places):
            if sequence is not None:
                known = sequence.newest(self.lookback + 1)
                tokens = np.concatenate([known, behind[place]])
                segments[place] = Segment(tokens, len(known) - 1, len(tokens), 0, ())
        return self.of(build_rows(segments, bucket, self.lookback))


def without_tables(params: nnx.State, host: HostTables, placement: Placement | None) -> nnx.State:
    """A model's parameters with a row a device in place of each table on the host."""
    stubs = {}
    for layer, table in host.tables.items():
        devices = placement.mesh.size if placement else 1
        stub = Fp8Rows.quantize(jax.numpy.zeros((devices, table.width)))
        if placement:
            stub = jax.device_put(stub, placement.sharding(".".join(map(str, table_path(layer)))))
        stubs[layer] = stub
    return with_tables(params, stubs)
