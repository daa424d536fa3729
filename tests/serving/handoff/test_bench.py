"""The measurement: both forms, two turns, and nothing is encoded twice."""

import os

import pytest

from serving.handoff.bench import measure
from serving.kv_pool.__main__ import main
from serving.kv_pool.fingerprint import fingerprint
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.second_turn import Setting
from serving.kv_pool.shm import pool_path
from tests.serving.handoff.support import WAIT_S


@pytest.mark.slow
def test_both_forms(tiny_dir, compiled_once):
    name = f"handoffs-{os.getpid()}"
    pool = PoolOptions(
        "shm",
        fingerprint(tiny_dir),
        capacity=10_000_000,
        name=name,
        lookup_s=WAIT_S,
        load_s=WAIT_S,
        batches=(1, 4),
    )
    setting = Setting(str(tiny_dir), "float32", pool, page_size=16, chunk=64, pages=3)
    try:
        rows = measure(setting, repeats=1)
    finally:
        pool_path(name).unlink(missing_ok=True)
    assert [(row["handoff"], row["turn"]) for row in rows] == [
        ("windows", 1),
        ("windows", 2),
        ("replay", 1),
        ("replay", 2),
    ]
    assert [row["encoder_rows"] for row in rows] == [0, 0, 16, 17]
    assert [row["loaded_tokens"] for row in rows] == [48, 15, 48, 14]
    assert rows[0]["handoff_bytes"] > 2 * rows[2]["handoff_bytes"] > 0
    assert all(row[name] > 0 for row in rows for name in ("prefill_ms", "leave_ms", "take_ms"))


def test_bad_options(tiny_dir, capsys):
    assert main(["handoff", "--checkpoint", str(tiny_dir), "--repeats=0"]) == 2
    assert capsys.readouterr().err.startswith("error: --kv-pool, --prompt-tokens, --repeats")
