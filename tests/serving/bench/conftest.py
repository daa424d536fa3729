"""Short samples for every test of a benchmark: what they time is not looked at."""

import pytest

from serving.bench import forward_time


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(forward_time, "_SAMPLE_S", 0.02)
