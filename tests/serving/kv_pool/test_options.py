"""What users say of a pool, and what they are shown."""

import shutil
import socket
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dsv41_jax.errors import UserError
from serving.kv_pool import mooncake, shm
from serving.kv_pool.__main__ import main
from serving.kv_pool.connect import open_pool
from serving.kv_pool.counts import Totals
from serving.kv_pool.fingerprint import fingerprint
from serving.kv_pool.keys import Namespace
from serving.kv_pool.options import PoolOptions, parse_bytes, parse_pool
from serving.kv_pool.shm import SharedMemoryStore, pool_path
from serving.options import EngineOptions
from serving.server.__main__ import main as serve
from serving.server.pool_metrics import PoolMetrics

SPACE = Namespace("model", "float32", 4, ((".a", "uint8", (100,)),))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Pools lie in a folder of their own."""
    monkeypatch.setattr(shm, "folder", lambda: tmp_path)
    return tmp_path


def test_pools_by_name():
    assert parse_pool("none", "m") is None
    assert parse_pool("shm", "m") == PoolOptions("shm", "m")
    assert parse_pool("shm:2GB", "m") == PoolOptions("shm", "m", capacity=2 * 10**9)
    assert parse_pool("shm:1MiB:a-b.c", "m") == PoolOptions(
        "shm", "m", capacity=2**20, name="a-b.c"
    )
    assert parse_pool("shm::mine", "m").name == "mine"
    assert parse_pool("mooncake:10.0.0.1:50051", "m").address == "10.0.0.1:50051"
    assert parse_pool("mooncake:::1:50051", "m").address == "::1:50051"


@pytest.mark.parametrize(
    ("text", "bytes_"), [("7", 7), ("7B", 7), ("2KB", 2000), ("3MiB", 3 << 20), ("1TiB", 1 << 40)]
)
def test_sizes(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("shared", "must be none, shm"),
        ("shm:0", "'0' must be bytes"),
        ("shm:4Q", "'4Q' must be bytes"),
        ("shm:1GB:a/b", "the name must be letters"),
        ("mooncake", "must be mooncake:HOST:PORT"),
        ("mooncake:host:0", "must be mooncake:HOST:PORT"),
        ("mooncake:host:99999", "must be mooncake:HOST:PORT"),
    ],
)
def test_bad_pools_end_the_server_with_one_line(tiny_dir, capsys, option, message):
    assert serve(["--checkpoint", str(tiny_dir), "--kv-pool", option]) == 2
    error = capsys.readouterr().err
    assert message in error and option in error and error.count("\n") == 1


def test_a_pool_needs_hits(tiny_dir, capsys):
    for switch in ("--no-prefix-cache", "--no-swa-bounded-replay"):
        assert serve(["--checkpoint", str(tiny_dir), "--kv-pool=shm", switch]) == 2
        assert "--kv-pool: needs --prefix-cache" in capsys.readouterr().err
    with pytest.raises(ValueError, match="kv_pool must go with"):
        EngineOptions(replay=False, kv_pool=PoolOptions("shm", "m"))
    with pytest.raises(ValueError, match="must be shm or mooncake"):
        PoolOptions("disk", "m")


def test_programs_of_an_engine_with_a_pool():
    plain = EngineOptions().programs(128)
    pooled = EngineOptions(kv_pool=PoolOptions("shm", "m", batches=(2, 9))).programs(128)
    added = [(name, bucket.pages) for name, bucket in pooled if (name, bucket) not in plain]
    assert added == [(n, pages) for n in ("take_pages", "put_pages") for pages in (2, 9)]


def test_a_fingerprint_is_that_of_the_copy_and_of_no_other(tiny_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_dir, copy)
    mark = fingerprint(copy)
    assert mark == fingerprint(tiny_dir) and len(mark) == 64
    (copy / "README.md").write_text("of no importance")
    assert fingerprint(copy) == mark
    largest = max(copy.iterdir(), key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    changes = [
        (copy / "config.json", (copy / "config.json").read_bytes().replace(b"1", b"2", 1)),
        (largest, data[:-1] + bytes([data[-1] ^ 1])),
        (largest, data + b"\0"),
        (largest, data[: len(data) // 2] + bytes(len(data) - len(data) // 2)),
        (copy / "more.json", b"{}"),
    ]
    for file, changed in changes:
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(changed)
        assert fingerprint(copy) != mark, file
        file.unlink() if before is None else file.write_bytes(before)
    assert fingerprint(copy) == mark
    with pytest.raises(UserError, match="has no files"):
        fingerprint(tmp_path / "none")


def test_a_pool_has_the_name_of_its_model_and_layout(here):
    options = PoolOptions("shm", "model", capacity=100_000)
    tier = open_pool(options, SPACE, window=8)
    assert [path.name for path in here.iterdir()] == [pool_path(SPACE.digest.hex()[:16]).name]
    tier.close()


def test_a_master_that_does_not_answer_is_named_before_the_checkpoint_is_read(
    tiny_dir, capsys, monkeypatch
):
    monkeypatch.setattr(mooncake, "mooncake_class", lambda: None)
    monkeypatch.setattr(mooncake, "_REACH_S", 0.0)
    monkeypatch.setattr("serving.server.__main__.load", None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"mooncake:127.0.0.1:{closed.getsockname()[1]}"
        assert serve(["--checkpoint", str(tiny_dir), "--kv-pool", address]) == 2
    assert f"--kv-pool {address}: nobody answers there" in capsys.readouterr().err


def test_pools_are_shown_and_removed(here, capsys):
    SharedMemoryStore(pool_path("mine"), 50_000, 1000).close()
    pool_path("odd").write_bytes(b"?")
    assert main(["show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("mine  ") and "values of 1000 bytes" in shown[0]
    assert shown[1] == "odd  1 bytes, not a pool of pages"
    assert main(["remove", "mine"]) == 0 and not pool_path("mine").exists()
    assert main(["remove", "mine"]) == 2
    assert "mine: no such pool, only odd" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--bytes=x"], ["--owners=0"], ["--lease-seconds=nan"]])
def test_bad_options_of_the_cluster(capsys, wrong):
    assert main(["mooncake", *wrong]) == 2
    assert wrong[0].partition("=")[0] in capsys.readouterr().err


def test_every_total_has_a_metric_that_follows_it():
    registry = CollectorRegistry()
    metrics = PoolMetrics(registry, "name")
    numbers = {field.name: index for index, field in enumerate(fields(Totals), 1)}
    metrics.show(Totals(**numbers))
    metrics.show(Totals(**{name: 2 * value for name, value in numbers.items()}))
    lines = generate_latest(registry).decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if "_total{" in line]
    assert sorted(values) == sorted(2.0 * value for value in numbers.values())
    assert 'vllm:external_prefix_cache_hits_total{model_name="name"} 4.0' in lines
    starved = 'dsv41_kv_pool_starved_steps_total{model_name="name",reason="lookup"}'
    assert any(line.startswith(starved) for line in lines)
