"""A cache that does not fit is refused before anything is allocated."""

import jax
import numpy as np
import pytest

from dsv41_jax.errors import UserError
from serving.memory import check_cache_fits


class Device:
    """One that tells its memory, or does not."""

    def __init__(self, **stats: int):
        self.stats = stats or None

    def memory_stats(self):
        return self.stats

    def __str__(self) -> str:
        return "gpu:3"


def cache(ranks: int):
    """2 GB a rank."""
    return {
        "rows": jax.ShapeDtypeStruct((ranks * 10**6, 500), np.float32),
        "tags": jax.ShapeDtypeStruct((ranks, 0), np.int32),
    }


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_a_rank_holds_must_fit_every_device(ranks):
    roomy, silent = Device(bytes_limit=9 * 10**9, bytes_in_use=7 * 10**9), Device()
    check_cache_fits(cache(ranks), ranks, [roomy, silent])
    full = Device(bytes_limit=9 * 10**9, bytes_in_use=7 * 10**9 + 1)
    said = "slots and pages take 2.00 GB of every device, gpu:3 has 2.00 GB left"
    with pytest.raises(UserError, match=said):
        check_cache_fits(cache(ranks), ranks, [roomy, full])
