"""Host-resident Engram tables: what threads fetch ahead is what a table on the device gives."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax import engram_bench, engram_host
from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.compiling import jit
from dsv41_jax.engram import compressed_history
from dsv41_jax.engram_host import HostTable, HostTables, RowBuffers, advise
from dsv41_jax.engram_shared import share_tables
from dsv41_jax.engram_staging import StagedParameters, Staging
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.ops import local_ops
from dsv41_jax.rows import Rows
from dsv41_jax.score import all_logits
from pallas_kernels.engram import kernel_sm90, ref
from pallas_kernels.engram.staged import StagedRows
from pallas_kernels.numerics import FLOAT32, REFERENCE
from pallas_kernels.quant import Fp8Rows
from tests.conftest import GOLDENS

CHECKPOINT = GOLDENS / "tiny_ckpt"
B, T = 2, 12


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(scope="module")
def model() -> Model:
    """Tables on the host."""
    return load_model(CHECKPOINT, numerics=REFERENCE, engram="host")


@pytest.fixture(scope="module")
def host(model):
    tables = HostTables.of(model, threads=3)
    yield tables
    tables.close()


@pytest.fixture
def staging(model, host):
    one = Staging(host, B, T)
    yield one
    one.close()


def rows_of(rng, model: Model, length: tuple[int, int] = (T, 5)) -> Rows:
    """Tokens, some of them outside the vocabulary or in an image; the first request goes on."""
    vocabulary = model.cfg.vocab_size
    zero = np.zeros(B, np.int32)
    previous = np.array([rng.integers(0, vocabulary, 3), [-1, -1, -1]], np.int32)
    return Rows(
        tokens=rng.integers(-1, vocabulary + 1, (B, T)).astype(np.int32),
        image=rng.random((B, T)) < 0.1,
        start=np.array([40, 0], np.int32),
        length=np.array(length, np.int32),
        slot=zero,
        page_table=zero[:, None],
        floor=zero,
        decoder_floor=zero,
        write_from=zero,
        previous=previous,
    )


def table_of(rng, rows: int, width: int = 64) -> Fp8Rows:
    return jax.tree.map(
        np.asarray, Fp8Rows.quantize(jnp.asarray(rng.standard_normal((rows, width))))
    )


def engram_layers(model: Model) -> list[int]:
    return list(model.cfg.engram_layer_ids)


@pytest.fixture(scope="module")
def outputs(model):
    """h [B, T, S, D] behind each Engram layer alone, and the table rows that it asked for."""
    ops, graph = local_ops(REFERENCE), nnx.graphdef(model)

    def run(params: nnx.State, rows: Rows, h: jax.Array):
        built = nnx.merge(graph, params)
        compressed = compressed_history(built.token_map[...], rows)
        pad = built.token_map[...][built.cfg.engram_pad_token_id]
        out = []
        for layer in engram_layers(built):
            engram = built.layers[layer].engram
            ids = engram.row_ids(compressed, pad)
            out.append((engram(ops, h, ids, ~rows.image), ids))
        return out

    return jit(run)


def streams(rng, model: Model) -> jax.Array:
    shape = (B, T, model.cfg.hc_mult, model.cfg.hidden_size)
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def test_staged_rows_give_what_the_tables_give(model, host, staging, outputs, rng):
    """Three forwards, each started before the one before it runs; padding rows mean nothing."""
    forwards = [rows_of(rng, model) for _ in range(3)]
    h, parameters = streams(rng, model), StagedParameters(nnx.state(model), staging)
    staging.start(forwards[0])
    for i, rows in enumerate(forwards):
        if i + 1 < len(forwards):
            staging.start(forwards[i + 1])
        got = outputs(parameters.take(), rows, h)
        direct = outputs(nnx.state(model), rows, h)  # NumPy tables, which the program copies whole
        live = np.arange(T) < rows.length[:, None]
        pairs = zip(engram_layers(model), got, direct, strict=True)
        for layer, (out, _), (want, ids) in pairs:
            assert np.array_equal(np.asarray(out)[live], np.asarray(want)[live])
            assert np.array_equal(host.row_ids(layer, rows)[live], np.asarray(ids)[live])


def test_staged_arrays_keep_their_addresses(model, staging, rng):
    def addresses(staged):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(staged)]

    staging.start(rows_of(rng, model))
    first = addresses(staging.take())
    staging.start(rows_of(rng, model))
    assert addresses(staging.take()) == first


def test_other_parameters_are_shared(model, staging):
    given = nnx.state(model)
    both = StagedParameters(given, staging).params, given
    mine, given = (dict(nnx.to_flat_state(params)) for params in both)
    assert mine.keys() == given.keys()

    def shared(path) -> bool:
        leaves = (jax.tree.leaves(params[path].get_value()) for params in (mine, given))
        return all(a is b for a, b in zip(*leaves, strict=False))

    different = [path for path in given if not shared(path)]
    assert different == [("layers", i, "engram", "embed", "weight") for i in engram_layers(model)]


@pytest.mark.parametrize("piece", [1024, 3])
def test_different_rows_are_fetched_once(piece, rng, monkeypatch):
    monkeypatch.setattr(engram_host, "PIECE", piece)
    table, ids = table_of(rng, 60), rng.integers(0, 20, (2, 7, 3)).astype(np.int32)
    ids += np.array([0, 20, 40], np.int32)  # columns own disjoint parts
    out = RowBuffers.empty(2, 7, 3, 64)
    with ThreadPoolExecutor(3) as pool:
        count = HostTable(table).gather(ids, out, pool)
    assert count == len(np.unique(ids))
    assert np.array_equal(out.codes[out.places], table.codes.view(np.uint8)[ids])
    assert np.array_equal(out.scales[out.places], table.scales[ids])
    assert not out.codes[count:].any()


@pytest.mark.parametrize("bad", [-1, 60])
def test_an_id_outside_the_table_is_refused(bad, rng):
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ValueError, match=r"must be below self.rows=60"),
    ):
        HostTable(table_of(rng, 60)).gather(
            np.full((1, 1, 1), bad, np.int32), RowBuffers.empty(1, 1, 1, 64), pool
        )


def test_a_mapped_table_gets_advice(tmp_path, rng):
    table = table_of(rng, 60)
    (tmp_path / "codes").write_bytes(b"x" * 100 + table.codes.tobytes())
    mapped = np.memmap(tmp_path / "codes", np.uint8, "r")
    codes = mapped[100:].view(table.codes.dtype).reshape(60, 64)
    assert advise(codes)[:1] == ("MADV_RANDOM",)
    assert advise(np.asarray(codes)) == advise(codes)
    assert advise(np.asarray(table.codes)) == ()
    given = HostTable(Fp8Rows(codes, table.scales))  # pyright: ignore[reportArgumentType]
    assert given.advice == (advise(codes), ())
    assert np.array_equal(given.codes, table.codes.view(np.uint8))


def test_forwards_come_in_order(model, staging, rng):
    with pytest.raises(RuntimeError, match="no forward was started"):
        staging.take()
    for _ in range(2):
        staging.start(rows_of(rng, model))
    with pytest.raises(RuntimeError, match="2 forwards are on their way"):
        staging.start(rows_of(rng, model))
    short = replace(rows_of(rng, model), tokens=np.zeros((B, T - 1), np.int32))
    with pytest.raises(ValueError, match=r"rows.tokens.shape=\(2, 11\) must be self.shape=\(2, 12"):
        staging.start(short)


def test_a_fault_while_fetching_reaches_the_caller(model, host, staging, rng, monkeypatch):
    def fail(*_):
        raise OSError("unreadable")

    monkeypatch.setattr(HostTable, "gather", fail)
    staging.start(rows_of(rng, model))
    with pytest.raises(OSError, match="unreadable"):
        staging.take()


def test_tables_that_are_not_the_models_are_refused(host, rng):
    (layer, *_) = host.tables
    with pytest.raises(ValueError, match=r"layer=1: table.shape=\(5, 64\) must have \d+ rows"):
        HostTables({layer: table_of(rng, 5)}, host.constants, host.token_map, host.pad)


def test_tables_on_the_device_are_refused(reference):
    with pytest.raises(ValueError, match=r"layer=1: the Engram table must be on the host"):
        HostTables.of(reference.model)


def test_rows_staged_for_other_ids_are_refused(rng):
    table = Fp8Rows.quantize(jnp.ones((4, 256)))
    staged = StagedRows(table, jnp.zeros((2, 3), jnp.int32))
    for rows in (ref.engram_rows, kernel_sm90.engram_rows):
        with pytest.raises(ValueError, match=r"table.places.shape=\(2, 3\) must be ids.shape="):
            rows(staged, jnp.zeros((2, 4), jnp.int32), dtype=jnp.bfloat16)


@pytest.mark.slow
def test_a_whole_forward_is_bit_equal(model, host, rng):
    """All positions of a prompt by one forward: staged rows against tables on the device."""
    direct = load_model(CHECKPOINT, numerics=FLOAT32)
    ids = rng.integers(0, model.cfg.vocab_size, 40).tolist()
    want = all_logits(direct, local_ops(FLOAT32), ids)
    mapped = load_model(CHECKPOINT, numerics=FLOAT32, engram="host")
    tables = HostTables.of(mapped)
    staging = Staging(tables, 1, len(ids))
    parameters = StagedParameters(nnx.state(mapped), staging)
    tokens = np.array([ids], np.int32)
    rows = replace(
        rows_of(rng, mapped),
        tokens=tokens,
        image=np.zeros((1, len(ids)), bool),
        length=np.array([len(ids)], np.int32),
        previous=np.full((1, 3), -1, np.int32),
    )
    staging.start(rows)
    staged = nnx.merge(nnx.graphdef(mapped), parameters.take())
    assert np.array_equal(all_logits(staged, local_ops(FLOAT32), ids), want)
    staging.close()
    tables.close()


def test_bench_reports_each_part(tmp_path, capsys):
    options = ["--rows", "20", "--table-rows", "2000", "--threads", "1,2"]
    options += ["--work", "0.1", "--side", "16"]
    out = tmp_path / "out.json"
    assert engram_bench.main([*options, "--directory", str(tmp_path), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["threads"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["distinct"] <= row["asked"] == 480
        assert all(value > 0 for name, value in row.items() if name.endswith("_ms"))
    assert "asked 480" in capsys.readouterr().out


def test_bench_refuses_bad_numbers(capsys):
    with pytest.raises(SystemExit):
        engram_bench.main(["--threads", "1,x"])
    assert "--threads 1,x must be positive numbers" in capsys.readouterr().err


class Held:
    """In place of a model: tables of two layers on the host."""

    def __init__(self, tables: list[Fp8Rows]):
        self.layers = [SimpleNamespace(layer=SimpleNamespace(engram=False))]
        for index, table in enumerate(tables):
            layer = SimpleNamespace(index=index, engram=True)
            module = SimpleNamespace(embed=Table(nnx.Param(table)))
            self.layers.append(SimpleNamespace(layer=layer, engram=module))

    def tables(self) -> list[Fp8Rows]:
        return [block.engram.embed() for block in self.layers[1:]]


class Table:
    def __init__(self, weight: nnx.Param):
        self.weight = weight

    def __call__(self) -> Fp8Rows:
        return self.weight.get_value()


def test_shared_tables_take_the_place_of_those_on_the_host(tmp_path, rng):
    """Of two models that were loaded apart: equal tables, one file."""
    before = [table_of(rng, 60), table_of(rng, 7)]
    models, told = [Held(before), Held(before)], []
    copies = [share_tables(model, tmp_path, progress=told.append) for model in models]
    assert [copy.created for copy in copies if copy] == [True, False] and len(told) == 1
    for model in models:
        for table, want in zip(model.tables(), before, strict=True):
            assert table.codes.dtype == want.codes.dtype
            assert table.codes.tobytes() == want.codes.tobytes()
            assert np.array_equal(table.scales, want.scales)
            assert HostTable(table).advice[0][:1] == ("MADV_RANDOM",)
    for copy in copies:
        copy.close()
    assert list(tmp_path.iterdir()) == []


def test_shared_tables_are_checked(tmp_path, rng):
    table = table_of(rng, 60)
    codes = np.array(table.codes)
    codes.view(np.uint8)[3, 5] = 0x7F
    model = Held([Fp8Rows(codes, table.scales)])
    with pytest.raises(
        UserError, match=r"layers.0.engram.embed.weight: codes: holds a NaN code at \[197\]"
    ):
        share_tables(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_engram_shares_nothing(tmp_path):
    assert share_tables(Held([]), tmp_path) is None


def test_tables_on_the_device_are_not_shared(tmp_path):
    model = Held([Fp8Rows.quantize(jnp.ones((4, 64)))])
    with pytest.raises(ValueError, match=r"layer=0: the Engram table must be on the host"):
        share_tables(model, tmp_path)
