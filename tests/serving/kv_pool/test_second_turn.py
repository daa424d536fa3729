"""Two engines in two processes: the second turn is loaded, and it is the same."""

import os

import pytest

from dsv41_jax.errors import UserError
from serving.kv_pool.__main__ import main
from serving.kv_pool.fingerprint import fingerprint
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.second_turn import Engine, Setting, measure
from serving.kv_pool.shm import pool_path
from tests.serving.kv_pool.support import WAIT_S

pytestmark = pytest.mark.usefixtures("compiled_once")


def patient(checkpoint, **pool) -> Setting:
    """Both engines wait for the pool as long as it takes."""
    options = PoolOptions(
        model=fingerprint(checkpoint), lookup_s=WAIT_S, load_s=WAIT_S, batches=(1, 4), **pool
    )
    return Setting(str(checkpoint), "float32", options, page_size=16, chunk=64, pages=3)


def assert_measured(setting: Setting) -> None:
    rows = measure(setting, repeats=2)
    assert [row["prefix"] for row in rows] == ["cold", "pool", "local"]
    assert [row["pool_tokens"] for row in rows] == [0, 48, 0]
    assert [row["cached_tokens"] for row in rows] == [0, 48, 48]
    assert all(row["ttft_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_in_shared_memory(tiny_dir):
    name = f"turns-{os.getpid()}"
    try:
        assert_measured(patient(tiny_dir, backend="shm", capacity=10_000_000, name=name))
    finally:
        pool_path(name).unlink(missing_ok=True)


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    engine = Engine(patient(tmp_path, backend="shm"))
    with pytest.raises(UserError, match=r"config\.json"):
        engine.ready()
    engine.close()


def test_bad_options(tiny_dir, capsys):
    base = ["second-turn", "--checkpoint", str(tiny_dir)]
    for wrong in ("--kv-pool=none", "--repeats=0", "--prompt-tokens=0"):
        assert main([*base, wrong]) == 2
        assert capsys.readouterr().err.startswith("error: --kv-pool, --prompt-tokens, --repeats")
