"""config.json: the released schema, one error for all faults, one warning for unknown keys."""

import copy
import dataclasses
import json
import warnings

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError


@pytest.fixture
def document() -> dict:
    return copy.deepcopy(Config.preset("tiny").to_json_dict())


def problems_of(document) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        Config.from_json(document)
    return caught.value.problems


def put(document: dict, path: str, value) -> None:
    *parents, key = path.split(".")
    for parent in parents:
        document = document[parent]
    document[key] = value


@pytest.mark.parametrize("preset", ["flash", "mini", "tiny"])
def test_presets_survive_a_round_trip_without_warnings(preset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = Config.preset(preset)
        again = Config.from_json(json.loads(json.dumps(cfg.to_json_dict())))
    assert again == cfg and hash(again) == hash(cfg)


def test_tiny_preset_is_the_golden_config(tiny_dir):
    golden = json.loads((tiny_dir / "config.json").read_text())
    assert Config.from_json(tiny_dir / "config.json") == Config.preset("tiny")
    assert Config.preset("tiny").to_json_dict() == golden


def test_flash_numbers():
    cfg = Config.preset("flash")
    assert cfg.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert (cfg.last_kv_source, cfg.hc_mixes, cfg.hc_width) == (20, 24, 20480)
    assert (cfg.attention_width, cfg.o_group_width) == (32768, 4096)
    assert (cfg.engram_columns, cfg.engram_width) == (24, 6144)
    assert (cfg.rope_factor, cfg.rope_original_max_position) == (16, 65536)
    assert (cfg.vision.num_hidden_layers, cfg.vision.max_wh_ratio) == (32, None)


def test_engram_primes(tiny_dir):
    flash = Config.preset("flash").engram_primes
    assert flash[0][0][0] == 16000057 and flash[0][2][7] == 16000463
    assert flash[1][0][0] == 16000477 and flash[1][2][7] == 16000889
    assert [sum(map(sum, layer)) for layer in flash] == [384006168, 384016682]
    constants = json.loads((tiny_dir.parent / "engram_constants.json").read_text())
    tiny = Config.preset("tiny").engram_primes
    assert json.loads(json.dumps(tiny)) == constants["primes"]


def test_every_absent_key_is_named(document):
    paths = set(flat(document))
    found = set()
    for path in paths - {"transformers_version"}:
        broken = copy.deepcopy(document)
        *parents, key = path.split(".")
        target = broken
        for parent in parents:
            target = target[parent]
        del target[key]
        assert problems_of(broken) == (f"{path}: is missing",)
        found.add(path)
    assert len(found) > 70


def flat(document, prefix=""):
    for key, value in document.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.scoring_func", "softmax"),
        ("text_config.topk_method", "greedy"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.num_key_value_heads", 8),
        ("text_config.attention_bias", True),
        ("text_config.attention_bias", 0),
        ("text_config.tie_word_embeddings", True),
        ("text_config.norm_topk_prob", False),
        ("text_config.n_shared_experts", 2),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.scale_fmt", "fp32"),
        ("quantization_config.expert_dtype", "fp8"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("model_type", "deepseek_v4"),
        ("architectures", ["DeepseekV4ForCausalLM"]),
    ],
)
def test_unsupported_values(document, path, value):
    put(document, path, value)
    (problem,) = problems_of(document)
    assert problem.startswith(f"{path} = {value!r}: must be ")


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        ("text_config.hidden_size", True, "integer"),
        ("text_config.hidden_size", 256.0, "integer"),
        ("text_config.hidden_size", -32, "integer"),
        ("text_config.hidden_size", 2**63, "integer"),
        ("text_config.num_hidden_layers", "8", "integer"),
        ("text_config.swiglu_limit", float("nan"), "positive finite"),
        ("text_config.rms_norm_eps", 0, "positive finite"),
        ("text_config.rope_theta", None, "positive finite"),
        ("text_config.compress_ratios", [0, 0, 2, 2, 1, 1, 1, True, 0, 0, 0], "list of integers"),
        ("text_config.kv_source_layer_ids", 2, "list of integers"),
        ("vision_config.max_wh_ratio", "3", "or null"),
        ("text_config", 3, "an object"),
        ("text_config.rope_scaling", None, "an object"),
    ],
)
def test_implausible_types(document, path, value, allowed):
    put(document, path, value)
    problems = problems_of(document)
    assert len(problems) == 1 and problems[0].startswith(f"{path} = ") and allowed in problems[0]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1, 0, 0], "entries"),
        ("compress_ratios", [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 1], "entries"),
        ("compress_ratios", [0, 0, 2, 2, 1, 1, 4, 1, 0, 0, 0], "0, 1 and 2"),
        ("compress_ratios", [0, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0], "ratio of the last KV source"),
        ("kv_source_layer_ids", [4, 2], "ascending"),
        ("kv_source_layer_ids", [2, 8], "ascending layer numbers"),
        ("kv_source_layer_ids", [1, 4], "compress_ratios of 1 or 2"),
        ("kv_source_layer_ids", [], "one or more"),
        ("index_source_layer_ids", [2, 6], "contain every KV source"),
        ("index_source_layer_ids", [2, 4, 4], "ascending"),
        ("candidate_source_layer_id", 2, "last KV source"),
        ("head_dim", 48, "multiple of 32"),
        ("moe_intermediate_size", 65, "multiple of 32"),
        ("qk_rope_head_dim", 31, "even"),
        ("qk_rope_head_dim", 66, "at most index_head_dim"),
        ("o_groups", 3, "divide"),
        ("num_experts_per_tok", 9, "at most n_routed_experts"),
        ("dspark_num_experts_per_tok", 5, "at most dspark_n_routed_experts"),
        ("engram_layer_ids", [1, 8], "ascending layer numbers"),
        ("engram_num_embeddings", [434, 607], "sums of the primes"),
        ("engram_num_embeddings", [434], "one entry for each"),
        ("engram_vocab_size", 2**24 - 10, "below 2^24"),
        ("engram_pad_token_id", 512, "below vocab_size"),
        ("dspark_noise_token_id", 512, "below vocab_size"),
        ("dspark_target_layer_ids", [5, 6, 8], "ascending layer numbers"),
        ("rope_scaling.beta_fast", 0.5, "at most"),
    ],
)
def test_fields_that_do_not_fit_together(document, path, value, words):
    put(document, f"text_config.{path}", value)
    assert any(words in problem for problem in problems_of(document))


def test_all_faults_come_at_once(document):
    document["text_config"]["scoring_func"] = "softmax"
    document["text_config"]["head_dim"] = 40
    document["text_config"]["hidden_size"] = None
    del document["eos_token_id"], document["quantization_config"]["scale_fmt"]
    document["extra"] = 1
    with pytest.raises(UserError) as caught:
        Config.from_json(document)
    message = str(caught.value)
    assert len(caught.value.problems) == 5
    for name in ("scoring_func", "head_dim", "hidden_size", "eos_token_id", "scale_fmt"):
        assert name in message


def test_one_warning_lists_every_unknown_key(document):
    document["use_cache"] = True
    document["text_config"]["attention_dropout"] = 0.0
    document["text_config"]["rope_scaling"]["mscale"] = 1.0
    with pytest.warns(UserWarning) as caught:
        assert Config.from_json(document) == Config.preset("tiny")
    (warning,) = caught
    for key in ("use_cache", "text_config.attention_dropout", "text_config.rope_scaling.mscale"):
        assert key in str(warning.message)


def test_replace_is_checked_and_config_is_frozen():
    cfg = Config.preset("tiny")
    assert dataclasses.replace(cfg, index_topk=4).index_topk == 4
    with pytest.raises(UserError, match=r"text_config\.head_dim = 33"):
        dataclasses.replace(cfg, head_dim=33)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.head_dim = 64


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[]", b'"x"', b"[" * 100_000])
def test_unreadable_files_are_named(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"config\.json: "):
        Config.from_json(path)


def test_absent_file_and_unknown_preset(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Config.from_json(tmp_path / "config.json")
    with pytest.raises(UserError, match="one of flash, mini, tiny"):
        Config.preset("pro")
