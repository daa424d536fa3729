"""Load-test workloads: lengths, shared prefixes, trace schemas, bad files."""

import json

import pytest

from dsv41_jax.errors import UserError
from serving.bench import workloads
from serving.bench.client import Timed
from serving.bench.serve import summary
from serving.bench.workloads import Scale


def test_synthetic_turns_grow_one_prompt_behind_a_shared_prefix():
    made = workloads.synthetic(
        conversations=3,
        turns=2,
        prompt_tokens=10,
        output_tokens=4,
        shared_tokens=6,
        vocabulary=50,
        seed=1,
    )
    firsts = [conversation.turns[0].prompt for conversation in made]
    assert len({prompt[:6] for prompt in firsts}) == 1
    assert len(set(firsts)) == 3
    for conversation in made:
        first, second = (turn.prompt for turn in conversation.turns)
        assert len(first) == 16
        assert len(second) == 16 + 4 + 10
        assert second[:16] == first
        assert all(3 <= token < 50 for token in second)


def test_mooncake_blocks_are_shared_by_hash(tmp_path):
    file = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 2500, "input_length": 700, "output_length": 1, "hash_ids": [4, 6]},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    one, two = workloads.mooncake(str(file), vocabulary=500, scale=Scale(time=0.5))
    assert (one.start_s, two.start_s) == (0.0, 1.25)
    (a,), (b,) = one.turns, two.turns
    assert (len(a.prompt), a.output_tokens, len(b.prompt)) == (1000, 7, 700)
    assert a.prompt[:512] == b.prompt[:512]
    assert a.prompt[512:700] != b.prompt[512:700]


def test_agent_traces_keep_order_scope_and_delays(tmp_path):
    def request(blocks, length, **more):
        return {"t": 0, "type": "n", "in": length, "out": 3, "hash_ids": blocks, **more}

    inner = {"type": "subagent", "agent_id": "x", "requests": [request([9], 20)]}
    steps = [request([1], 64), inner, request([1, 2], 100, think_time=2.0)]
    records = [
        {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": steps}
        for name in ("a", "b")
    ]
    file = tmp_path / "agents.json"
    file.write_text(json.dumps(records))
    scale = Scale(tokens=0.5, time=0.1, max_tokens=40)
    one, two = workloads.agents(str(file), vocabulary=500, scale=scale)
    assert [len(turn.prompt) for turn in one.turns] == [32, 10, 38]
    assert [turn.delay_s for turn in one.turns] == [0.0, 0.0, pytest.approx(0.2)]
    assert one.turns[2].prompt[:32] == one.turns[0].prompt
    assert one.turns[0].prompt != two.turns[0].prompt


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "record 1"),
        ("[1]", "must be a JSON object"),
        ('{"timestamp": 0}', "hash_ids"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": []}', "line 1"),
    ],
)
def test_bad_traces_are_named(tmp_path, text, named):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=named):
        workloads.mooncake(str(file), vocabulary=500, scale=Scale())


def test_missing_trace_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        workloads.agents(str(tmp_path / "nowhere"), vocabulary=500, scale=Scale())


def test_summary_counts_good_requests_and_names_errors():
    good = Timed(100, 0.0, 0.2, 1.0, [0.1, 0.3], 3, 64)
    row = summary([good, Timed(50, 0.0, error="HTTP 429")], 2.0)
    assert row["requests"] == 2
    assert row["requests_per_s"] == 0.5
    assert row["tokens_per_s"] == 51.5
    assert row["hit_rate"] == 0.64
    assert row["itl_p50_ms"] == 200.0
    assert row["errors"] == {"HTTP 429": 1}
