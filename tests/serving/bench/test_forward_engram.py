"""``serving.bench forward`` with Engram tables on the host."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.cache import CacheShape
from dsv41_jax.config import Config
from dsv41_jax.engram_host import HostTables
from dsv41_jax.ops import local_ops
from pallas_kernels.numerics import SERVING
from serving.bench import forward_time
from serving.bench.__main__ import main
from serving.bench.forward_cache import filled_cache
from serving.bench.forward_cases import Case, Group, dispatches
from serving.bench.forward_engram import Fetching, HostSteps, host_tables, without_tables
from serving.bench.forward_floor import Floors
from serving.bench.forward_inputs import layer_rows, lengths_of, program_inputs
from serving.bench.forward_measure import Bench
from serving.bench.forward_model import measured_model
from serving.bench.forward_programs import SharedPrograms
from serving.bench.forward_report import read_rows, tables
from serving.bench.forward_routing import new_tables
from serving.bench.forward_weights import random_sets, weight_sets
from sharding.hardware import hardware
from sharding.place import place

TINY = measured_model(Config.preset("tiny"), "1,4,5", 1000)
SMALL = ["forward", "--preset", "tiny", "--layers", "1,4,5", "--weight-sets", "1", "--jobs", "1"]
SMALL += ["--batch", "2", "--context", "64", "--no-layer-times"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Times that mean nothing need no long samples."""
    monkeypatch.setattr(forward_time, "_SAMPLE_S", 0.01)


def programs_of(cfg: Config, host: HostTables | None = None) -> SharedPrograms:
    """Of one weight set."""
    sets = weight_sets(cfg, SERVING, place("tp1", cfg), 1, "reference", draft=False)
    routing = new_tables(cfg, "random", 1, draft=False)
    ops = local_ops(SERVING, "reference")
    return SharedPrograms(sets, ops, CacheShape(2, 4, 64), routing, host=host)


def test_steps_with_tables_on_the_host(tmp_path, capsys):
    """Both orders with one program, none of whose inputs has the size of a table."""
    path = tmp_path / "forward.json"
    assert main([*SMALL, "--engram", "host-ahead,host-late", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [row["engram"] for row in document["rows"]] == ["host-ahead", "host-late"]
    for row in document["rows"]:
        assert row["measured"] and row["finite"] and row["caches_moved"] == 0
        assert row["fetch_us"] > 0 and 0 < row["floor_us"] < row["us"]
        assert row["tflop"] is None and row["matmul_pct"] is None
    # The device keeps a few rows in place of each table.
    rows = sum(without_tables(TINY).engram_num_embeddings)
    assert document["rows"][0]["bytes_per_device"]["engram tables"] == rows * 66
    assert "Engram tables of 434 rows in 2.86e-05 GB of mapped files" in document["notes"][-1]
    printed = capsys.readouterr()
    assert "fetch us" in printed.out and "decode 2*1@64, engram host-late" in printed.out
    assert printed.err.count("compiled decode") == 1


@pytest.mark.slow
def test_a_program_with_fetched_rows_gives_what_tables_give():
    case = Case("decode", "decode", (Group(2, 1, 64),))
    (dispatch,) = dispatches(TINY, case, 64)
    with host_tables(TINY) as host:
        ids = jnp.asarray(host.token_map)
        outs = []
        for cfg, tables in ((TINY, None), (without_tables(TINY), host)):
            programs = programs_of(cfg, tables)
            weights = random_sets(programs.sets, "reference") | {"token_map": ids}
            cache = filled_cache(programs)(jnp.asarray(lengths_of(2, [dispatch])))
            inputs = program_inputs(cfg, dispatch, True)
            if tables is None:
                (layer,) = host.tables
                table = host.tables[layer]
                stored = weights[f"layers.{layer}.engram.embed.weight"]
                codes = jnp.asarray(table.codes).view(stored.codes.dtype)
                weights[f"layers.{layer}.engram.embed.weight"] = replace(
                    stored, codes=codes, scales=jnp.asarray(table.scales)
                )
            else:
                rows = replace(
                    layer_rows(cfg, dispatch, True),
                    tokens=np.asarray(cache.last_token)[:, None],
                    previous=np.asarray(cache.history),
                )
                inputs = *inputs, *Fetching.of(host, programs).tables.of(rows)
            routing = jax.device_put(new_tables(cfg, "random", 1, draft=False))
            run = programs.traced("decode", dispatch.bucket).lower().compile()
            outs.append(run({"weights": weights, "routing": routing}, cache, *inputs))
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b, equal_nan=True)), *outs)
    assert all(jax.tree.leaves(same))


class Cache:
    def __init__(self, events: list[str]):
        self.events = events

    def block_until_ready(self) -> "Cache":
        self.events.append("wait")
        return self


class Sampled:
    def __init__(self, events: list[str]):
        self.events = events

    def __array__(self, dtype=None, copy=None):
        self.events.append("read")
        return np.zeros(1)


@pytest.mark.parametrize(
    ("late", "prompt", "expected"),
    [
        (False, False, ["fetch", "run", "fetch", "run"]),
        (True, False, ["fetch", "run", "read", "fetch", "run", "read"]),
        (False, True, ["fetch", "run", "fetch", "run", "run"] * 2),
        (True, True, ["fetch", "run", "wait", "fetch", "run", "run", "read"] * 2),
    ],
)
def test_what_waits_for_what(late, prompt, expected):
    """A late step fetches only what nothing runs beside; two steps of each kind."""
    events = []
    group = Group(1, 96, 96) if prompt else Group(2, 1, 64)
    plan = dispatches(TINY, Case("c", "prefill" if prompt else "decode", (group,)), 64)

    def run(params, cache, *given):
        events.append("run")
        encoded = prompt and given[0] == "encode"
        return Cache(events) if encoded else (Cache(events), Sampled(events))

    def fetch():
        events.append("fetch")
        return ()

    fetches = [None if one.program == "replay" else fetch for one in plan]
    inputs = [(one.program,) for one in plan]
    step = HostSteps(None, Cache(events), plan, [run] * len(plan), inputs, fetches, late)
    step()
    step()
    assert events == expected


def test_each_step_looks_up_other_tokens():
    case = Case("mix", "mixed", (Group(1, 64, 64), Group(2, 1, 64), Group(2, 6, 64, 5)))
    with host_tables(TINY) as host:
        table = host.tables[0]
        assert table.rows == 434 and set(table.advice[0]) <= {"MADV_RANDOM", "MADV_HUGEPAGE"}
        fetching = Fetching.of(host, programs_of(without_tables(TINY), host))
        for dispatch in dispatches(TINY, case, 64):
            fetch = fetching.fetch(TINY, dispatch, replay=True)
            if dispatch.program == "replay":
                assert fetch is None
                continue
            shape = dispatch.bucket.requests, dispatch.bucket.rows, TINY.engram_columns
            found = []
            for _ in range(2):
                ((rows,),) = (staged.values() for staged in fetch())
                assert rows.places.shape == shape and rows.rows.shape[1] == TINY.engram_head_dim
                assert np.isfinite(np.asarray(rows.rows.dequantize(jnp.float32))).all()
                found.append(
                    np.asarray(rows.places).tobytes() + np.asarray(rows.rows.codes).tobytes()
                )
            assert found[0] != found[1]
        fetching.close()


def test_a_broken_case_says_why(monkeypatch):
    """And does not end the others."""
    programs = programs_of(TINY)
    bench = Bench(programs, None, Floors(programs.sets, hardware("h200"), "random"), 64, False)
    case = Case("decode", "decode", (Group(2, 1, 64),))

    def broken(*_):
        raise NotImplementedError("no such kernel\nsomewhere")

    with monkeypatch.context() as patch:
        patch.setattr(programs, "traced", broken)
        bench.compile([case], 1)
    found = bench.run(case)
    why = "decode 2 x 1 does not compile: NotImplementedError: no such kernel"
    assert (found.timing, found.why) == (None, why)
    (one,) = bench.compiled
    bench.compiled[one] = SimpleNamespace(as_text=lambda: "\nENTRY %main () -> () {\n}")
    monkeypatch.setattr(Bench, "_time", broken)
    found = bench.run(case)
    assert (found.timing, found.why) == (None, "NotImplementedError: no such kernel")


def test_rows_of_an_older_file(tmp_path):
    """Before there were tables on the host all were in HBM."""
    path = tmp_path / "older.json"
    row = {
        "case": "decode 2*1@64", "name": "decode", "phase": "decode", "layout": "tp1", "batch": 2,
        "rows": 1, "context": 64, "replay": True, "routing": "random", "measured": True, "us": 2.0,
        "spread_pct": 0.1, "host_pct": 1.0, "floor_us": 1.0, "extrapolated_us": None,
        "launches": 3, "caches_moved": 0, "results_moved": 0, "why": "", "parts": {},
    }  # fmt: skip
    path.write_text(json.dumps({"rows": [row]}))
    (found,) = read_rows(str(path))
    assert row.items() < found.items() and found["engram"] == "hbm"
    late = found | {"engram": "host-late", "us": 3.0, "fetch_us": 0.5}
    shown = tables([found, late], "a machine")
    assert shown[-1].split() == [
        "tp1",
        "decode",
        "2*1@64",
        "random",
        "host-late",
        "3.0",
        "0.5",
        "1.5",
    ]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--engram", "host"], "--engram host: must be of hbm, host-ahead, host-late"),
        (["--engram", "hbm,host-late", "--layers", "4,5"], "none of the layers has a table"),
        (["--engram", "host-late", "--phase", "replay"], "no case has a layer that reads tables"),
        (
            ["--preset", "flash", "--layers", "all", "--context", "8192", "--engram", "host-late",
             "--engram-rows", "999999999"],
            "files of 202.8 GB must be at most 17.2 GB",
        ),
    ],
)  # fmt: skip
def test_bad_input(arguments, what, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert what in capsys.readouterr().err
