"""Engram tables on the host: what a step is given is what tables on the device give its rows."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.engram_host import HostTables
from pallas_kernels.numerics import FLOAT32
from pallas_kernels.quant import Fp8Rows
from serving.batch import NOBODY, Segment, build_rows
from serving.buckets import Bucket
from serving.engine import Engine
from serving.generate import load
from serving.request import Request
from serving.sequence import Sequence
from serving.speculative import Speculation
from serving.table_rows import TableRows
from tests.sharding.devices.check_engine import OPTIONS, TINY, golden_requests

LOOKBACK = 3


@pytest.fixture(scope="module")
def host(tiny_dir):
    tables = HostTables.of(load_model(tiny_dir, numerics=FLOAT32, engram="host"), threads=2)
    yield tables
    tables.close()


@pytest.fixture
def table_rows(host) -> TableRows:
    """Of two data ranks."""
    return TableRows(host, ranks=2, lookback=LOOKBACK, device=jax.devices()[0])


def running(prompt: list[int], generated: list[int]) -> Sequence:
    sequence = Sequence.of(Request(tuple(prompt), 16), 0)
    sequence.result.token_ids = generated
    return sequence


def whole(host: HostTables, layer: int, tokens: list[int]) -> np.ndarray:
    """Bytes [T, C, N + N/32] of the rows of a sequence from its first token on."""
    rows = build_rows([Segment(tokens, 0, len(tokens), 0, ())], Bucket(1, len(tokens), 1), LOOKBACK)
    ids, table = host.row_ids(layer, rows)[0], host.tables[layer]
    return np.concatenate([table.codes[ids], table.scales[ids]], axis=-1)


def stored(staged, layer: int, rank: int, place: int, row: int) -> np.ndarray:
    """Bytes [C, N + N/32] that a place of a data rank finds for one of its rows."""
    rows, places = staged[layer].rows, np.asarray(staged[layer].places)
    count, requests = len(rows.codes) // 2, len(places) // 2
    at = rank * count + places[rank * requests + place, row]
    codes = np.asarray(rows.codes).view(np.uint8)[at]
    return np.concatenate([codes, np.asarray(rows.scales)[at]], axis=-1)


def test_rows_of_the_newest_tokens_and_drafts(host, table_rows):
    """A sequence shorter than the hash looks back, and one whose prompt has just ended."""
    first, second = running([5, 9], []), running([7, 8, 11, 4], [300, 21])
    places = [first, None, second, None]
    drafts = np.array([[17, 18], [0, 0], [40, 41], [0, 0]], np.int32)
    (staged,) = table_rows.of_newest(Bucket(4, 3, 1), places, drafts)
    assert set(staged) == set(host.tables)
    for layer in staged:
        for rank, sequence, mine in ((0, first, [17, 18]), (1, second, [40, 41])):
            known = sequence.tokens_known().tolist()
            want = whole(host, layer, [*known, *mine])
            for row in range(3):
                got = stored(staged, layer, rank, 0, row)
                assert got.tobytes() == want[len(known) - 1 + row].tobytes()


def test_rows_of_prompts(host, table_rows):
    """A chunk behind others: its first rows look back at them."""
    tokens = list(range(20, 33))
    segments = [NOBODY, NOBODY, Segment(tokens, 6, 13, 0, ()), NOBODY]
    rows = build_rows(segments, Bucket(4, 8, 1), LOOKBACK)
    (staged,) = table_rows.of(rows)
    for layer in staged:
        want = whole(host, layer, tokens)
        for row in range(7):
            assert stored(staged, layer, 1, 0, row).tobytes() == want[6 + row].tobytes()


def test_without_tables_on_the_host_there_is_nothing():
    rows = TableRows(None, ranks=1, lookback=LOOKBACK, device=None)
    assert rows.of(build_rows([], Bucket(1, 1, 1), LOOKBACK)) == ()
    assert rows.of_newest(Bucket(1, 1, 1), [None]) == ()


def fetching() -> list[str]:
    """Threads that fetch rows."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("engram")]


def test_closing_ends_the_threads(host):
    before = fetching()
    tables = {layer: Fp8Rows(t.codes, t.scales) for layer, t in host.tables.items()}
    own = HostTables(tables, host.constants, host.token_map, host.pad, threads=2)
    rows = TableRows(own, ranks=1, lookback=LOOKBACK, device=jax.devices()[0])
    rows.of(build_rows([Segment([5] * 4, 0, 4, 0, ())], Bucket(1, 4, 1), LOOKBACK))
    assert len(fetching()) > len(before)
    rows.close()
    assert sorted(fetching()) == sorted(before)
    TableRows(None, ranks=1, lookback=LOOKBACK, device=None).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engram", "speculation"), [("host", None), ("shared", Speculation())], ids=["host", "shared"]
)
def test_the_text_is_that_of_tables_on_the_device(engram, speculation, tmp_path):
    """Chunks and preemption included, as tests of engines on layouts have them; with drafts, from
    shared memory.
    """
    where = f"{engram}:{tmp_path}" if engram == "shared" else engram
    loaded = load(TINY, FLOAT32, kernels="reference", speculation=True, engram=where)
    assert len(list(tmp_path.iterdir())) == (engram == "shared")
    pages = OPTIONS.pages if speculation is None else 12
    engine = Engine(
        loaded.model, loaded.ops, replace(OPTIONS, pages=pages, speculation=speculation)
    )
    engine.warm_up()
    requests, tokens = golden_requests()
    events = []
    done = engine.run(requests, lambda _, event: events.append(event.token.token_id))
    assert [sequence.result.token_ids for sequence in done] == tokens
    assert sorted(events) == sorted(token for each in tokens for token in each)
    assert engine.compiles.count == 0 and engine.executor.programs.host
    if speculation:
        assert engine.acceptance.drafted > 0
    engine.close()
    loaded.close()
    assert list(tmp_path.iterdir()) == []
