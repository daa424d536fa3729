"""Engram hashes on the device and on the host against Python integers and the reference."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.engram_hash import HashConstants, hash_rows_host
from dsv41_jax.tokenizer import Tokenizer, token_map
from pallas_kernels.engram.hash import BARRIER, compress_ids, ngram_rows, split_words
from tests.conftest import GOLDENS

FLASH, TINY = Config.preset("flash"), Config.preset("tiny")
LAYERS = [(FLASH, 1), (FLASH, 14), (TINY, 1), (TINY, 2)]
TOKEN_MAP, PAD = token_map(Tokenizer.from_dir(GOLDENS / "tiny_ckpt", TINY), TINY)


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


def rows_by_big_integers(compressed, pad, constants):
    """The specification, position by position; `compressed` starts with the lookback."""
    lookback = len(constants.multipliers) - 1
    out = []
    for p in range(lookback, len(compressed)):
        row, acc, alive, column = [], 0, True, 0
        for back, multiplier in enumerate(constants.multipliers):
            alive = alive and compressed[p - back] != BARRIER
            acc ^= (int(compressed[p - back]) if alive else pad) * multiplier
            if back:
                for prime in constants.primes[back - 1]:
                    row.append(acc % prime + constants.offsets[column])
                    column += 1
        out.append(row)
    return np.array(out)


def device_rows(ids, dead, previous, constants):
    """What a program does: raw ids and deadness in, rows out."""
    history = jnp.concatenate([previous, jnp.where(dead, BARRIER, ids)])
    return ngram_rows(compress_ids(TOKEN_MAP, history), PAD, *constants.device_arrays())


def test_release_constants():
    first, second = HashConstants.of(FLASH, 1), HashConstants.of(FLASH, 14)
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    tails = [prime - 16_000_000 for row in first.primes for prime in row]
    assert tails == [
        *(57, 79, 81, 97, 121, 129, 133, 183),
        *(189, 207, 211, 253, 277, 289, 307, 321),
        *(339, 381, 393, 399, 403, 409, 447, 463),
    ]
    assert second.primes[0][0] == 16_000_477
    assert second.primes[-1][-1] == 16_000_889
    assert (first.rows, second.rows) == (384_006_168, 384_016_682)
    assert first.offsets[:2] == (0, 16_000_057)


@pytest.mark.golden
def test_tiny_constants_are_the_references():
    expected = json.loads((GOLDENS / "engram_constants.json").read_text("utf-8"))
    for index, layer_id in enumerate(TINY.engram_layer_ids):
        constants = HashConstants.of(TINY, layer_id)
        assert list(constants.multipliers) == [int(m) for m in expected["multipliers"][index]]
        assert [list(row) for row in constants.primes] == expected["primes"][index]
        assert list(constants.offsets) == expected["offsets"][index]
        assert constants.rows == TINY.engram_num_embeddings[index]


def test_layer_without_engram_is_refused():
    with pytest.raises(ValueError, match="layer_id=2 must be one of"):
        HashConstants.of(FLASH, 2)


def test_split_words_are_exact():
    values = np.array([0, 1, 2**32 - 1, 2**32, 2**63 - 1])
    hi, lo = split_words(values)
    assert [int(h) * 2**32 + int(low) for h, low in zip(hi, lo, strict=True)] == values.tolist()


@pytest.mark.parametrize(("cfg", "layer_id"), LAYERS)
def test_device_equals_big_integers(x64, cfg, layer_id):
    constants = HashConstants.of(cfg, layer_id)
    vocabulary = cfg.engram_compressed_vocab_size
    rng = np.random.default_rng(layer_id)
    compressed = rng.integers(0, vocabulary, size=1503, dtype=np.int32)
    compressed[rng.random(1503) < 0.1] = BARRIER
    compressed[:2], compressed[2:6], compressed[6:8] = (BARRIER, 0), vocabulary - 1, 0
    actual = jax.jit(ngram_rows)(compressed, PAD, *constants.device_arrays())
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, rows_by_big_integers(compressed, PAD, constants))
    assert actual.min() >= 0 and actual.max() < constants.rows


def test_last_row_of_the_release_table_is_reached(x64):
    """The largest row of the release, 384,016,681, comes out exact."""
    constants = HashConstants.of(FLASH, 14)
    hi, lo = split_words(np.array([constants.primes[-1][-1] - 1, 1, 1, 1]))
    _, _, primes, offsets = constants.device_arrays()
    compressed = np.array([0, 0, 0, 1], np.int32)
    assert ngram_rows(compressed, 0, hi, lo, primes, offsets)[0, -1] == 384_016_681


def test_host_equals_big_integers():
    constants = HashConstants.of(FLASH, 14)
    vocabulary = FLASH.engram_compressed_vocab_size
    rng = np.random.default_rng(5)
    ids = rng.integers(0, vocabulary, size=1200)
    dead = rng.random(1200) < 0.1
    actual = hash_rows_host(ids, dead, constants, np.arange(vocabulary, dtype=np.int32), 7)
    history = np.concatenate([np.full(3, BARRIER), np.where(dead, BARRIER, ids)])
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, rows_by_big_integers(history, 7, constants))


def golden_cases(goldens):
    trace, image = goldens("trace_quant_p37.npz"), goldens("vl_mask_p37.npz")
    yield trace["input_ids"], np.zeros(37, bool), trace["engram_hash_ids"]
    yield image["input_ids"], image["token_types"] >= 0, image["engram_hash_ids"]
    extra = goldens("extra_vectors.npz")
    for name in ("img1", "img2"):
        dead = extra[f"{name}.token_types"] >= 0
        yield extra[f"{name}.input_ids"], dead, extra[f"{name}.engram_hash_ids"]


def test_reference_hashes(x64, goldens):
    none = np.full(3, BARRIER, np.int32)
    for ids, dead, expected in golden_cases(goldens):
        for index, layer_id in enumerate(TINY.engram_layer_ids):
            constants = HashConstants.of(TINY, layer_id)
            host = hash_rows_host(ids, dead, constants, TOKEN_MAP, PAD)
            np.testing.assert_array_equal(host, expected[:, index])
            device = device_rows(ids, dead, none, constants)
            np.testing.assert_array_equal(device, expected[:, index])


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 11, 18, 36, 37])
def test_chunks_equal_the_whole(goldens, cut):
    image = goldens("vl_mask_p37.npz")
    ids, dead = image["input_ids"], image["token_types"] >= 0
    constants = HashConstants.of(TINY, 1)
    history = np.concatenate([np.full(3, BARRIER), np.where(dead, BARRIER, ids)]).astype(np.int32)
    previous = history[cut : cut + 3]
    whole = image["engram_hash_ids"][cut:, 0]
    host = hash_rows_host(ids[cut:], dead[cut:], constants, TOKEN_MAP, PAD, previous)
    np.testing.assert_array_equal(host, whole)
    np.testing.assert_array_equal(device_rows(ids[cut:], dead[cut:], previous, constants), whole)


def test_foreign_ids_are_barriers_and_never_indices(x64):
    ids = np.array([-1, 0, 511, 512, 2**31 - 1, -(2**31), 5], np.int32)
    compressed = compress_ids(TOKEN_MAP, ids)
    expected = [-1, TOKEN_MAP[0], TOKEN_MAP[511], -1, -1, -1, TOKEN_MAP[5]]
    assert compressed.dtype == jnp.int32
    np.testing.assert_array_equal(compressed, expected)


@pytest.mark.parametrize("foreign", [-1, 512])
def test_padding_leaves_live_tokens_alone(x64, foreign):
    """Padding ends every n-gram that reaches it, wherever it lies, and itself hashes as padding."""
    constants = HashConstants.of(TINY, 2)
    live = np.array([40, 41, 42, 43, 44], np.int32)
    none = np.full(3, BARRIER, np.int32)
    alone = np.asarray(device_rows(live, np.zeros(5, bool), none, constants))
    padding = np.full(2, foreign, np.int32)
    padded = np.concatenate([padding, live, padding, live, padding])
    dead = np.zeros(len(padded), bool)
    device = np.asarray(device_rows(padded, dead, none, constants))
    host = hash_rows_host(padded, dead, constants, TOKEN_MAP, PAD)
    np.testing.assert_array_equal(device, host)
    np.testing.assert_array_equal(device[2:7], alone)
    np.testing.assert_array_equal(device[9:14], alone)
    only_pad = rows_by_big_integers([PAD] * 4, PAD, constants)
    np.testing.assert_array_equal(device[[0, 1, 7, 8, 14, 15]], np.repeat(only_pad, 6, axis=0))


def test_batched_rows_equal_single_ones():
    constants = HashConstants.of(TINY, 1)
    compressed = np.random.default_rng(3).integers(-1, 286, size=(2, 3, 8), dtype=np.int32)
    batched = ngram_rows(compressed, PAD, *constants.device_arrays())
    assert batched.shape == (2, 3, 5, 6)
    single = [ngram_rows(row, PAD, *constants.device_arrays()) for row in compressed.reshape(6, 8)]
    np.testing.assert_array_equal(batched.reshape(6, 5, 6), np.stack(single))


def test_host_refuses_a_wrong_history():
    constants = HashConstants.of(TINY, 1)
    with pytest.raises(ValueError, match=r"previous.shape=\(2,\) must be \(3,\)"):
        hash_rows_host(np.arange(4), np.zeros(4, bool), constants, TOKEN_MAP, PAD, np.zeros(2, int))
