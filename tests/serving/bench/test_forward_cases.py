"""Cases of ``serving.bench forward``: the grammar, the engine's dispatches, layers that are left
out.
"""

from dataclasses import replace

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.layer_plan import layer_plan
from serving.bench.forward_cases import (
    Case,
    Group,
    cache_shape,
    dispatches,
    parse_case,
    phase_cases,
)
from serving.bench.forward_inputs import layer_rows, lengths_of, program_inputs
from serving.bench.forward_model import kinds, measured_model

FLASH = Config.preset("flash")
TINY = Config.preset("tiny")


@pytest.mark.parametrize(
    ("text", "phase", "groups"),
    [
        ("d=32*1@8192", "decode", [Group(32, 1, 8192)]),
        ("v=16*6@4096:5", "verify", [Group(16, 6, 4096, 5)]),
        ("p=8192", "prefill", [Group(1, 8192, 8192)]),
        ("hit=2048@10240", "prefill", [Group(1, 2048, 10240)]),
        ("c=2048@10240c", "prefill", [Group(1, 2048, 10240, 0, True)]),
        ("mix=8192,32*1@8192", "mixed", [Group(1, 8192, 8192), Group(32, 1, 8192)]),
    ],
)
def test_grammar(text, phase, groups):
    case = parse_case(text)
    assert (case.name, case.phase, list(case.groups)) == (text.partition("=")[0], phase, groups)
    again = parse_case(f"{case.name}={','.join(map(str, case.groups))}")
    assert again == case


@pytest.mark.parametrize(
    "text", ["x", "x=", "=8", "x=0*8", "x=8@4", "x=a", "x=2*", "x=8:5", "x=8,", "x=1" + "0" * 9]
)
def test_bad_cases_are_refused(text):
    with pytest.raises(UserError, match="--case"):
        parse_case(text)


def ran(case: Case, chunk: int = 4096) -> list[tuple]:
    return [
        (d.program, d.bucket.requests, d.bucket.rows, d.places[0].start, d.places[0].stop)
        for d in dispatches(FLASH, case, chunk)
    ]


def test_a_prompt_is_encoded_in_chunks_and_replayed_once():
    prompt = Case("p", "prefill", (Group(2, 9000, 9000),))
    assert ran(prompt) == [
        ("encode", 2, 4096, 0, 4096),
        ("encode", 2, 4096, 4096, 8192),
        ("encode", 2, 808, 8192, 9000),
        ("replay", 2, 128, 8872, 9000),
    ]
    off = Case("p", "prefill", (Group(1, 4096, 4096),), replay=False)
    assert ran(off) == [("prefill_full", 1, 4096, 0, 4096)]


def test_behind_a_hit_the_window_is_recomputed_but_nothing_is_stored():
    hit = Case("h", "prefill", (Group(1, 2048, 10240),))
    assert ran(hit)[0] == ("encode", 1, 2176, 8064, 10240)
    (first, *_) = dispatches(FLASH, hit, 4096)
    rows = layer_rows(FLASH, first, replay=True)
    assert (rows.write_from, rows.floor, rows.decoder_floor) == (8192, 8064, 10112)
    assert ran(replace(hit, replay=False))[0] == ("prefill_full", 1, 4096, 0, 4096)
    chunked = Case("c", "prefill", (Group(1, 2048, 10240, 0, True),))
    assert ran(chunked)[0] == ("encode", 1, 2048, 8192, 10240)
    (first, *_) = dispatches(FLASH, chunked, 4096)
    assert layer_rows(FLASH, first, replay=True).write_from == 0


def test_phases():
    found = list(phase_cases(FLASH, ["decode", "verify", "draft", "replay"], [8], [8192], [], []))
    assert [ran(case) for case in found] == [
        [("decode", 8, 1, 8191, 8192)],
        [("verify", 8, 6, 8186, 8192)],
        [("draft", 8, 5, 8191, 8192)],
        [("replay", 8, 128, 8064, 8192)],
    ]
    prompts = phase_cases(FLASH, ["prefill"], [], [], [1024], [False, True])
    assert [(case.replay, case.captured) for case in prompts] == [
        (False, True),
        (True, False),
        (True, True),
    ]


def test_requests_of_a_mixed_case_share_nothing():
    case = parse_case("mix=256,3*1@300,2*6@200:5")
    plan = dispatches(TINY, case, 128)
    assert [d.program for d in plan] == ["encode", "encode", "replay", "decode", "verify"]
    shape = cache_shape([case])
    assert shape.slots == 6
    owners: dict[int, int] = {}
    for dispatch in plan:
        for place in dispatch.places:
            assert len(place.pages) * shape.page_size >= place.stop
            for page in place.pages:
                assert page < shape.pages and owners.setdefault(page, place.slot) == place.slot
    assert lengths_of(6, plan).tolist() == [0, 299, 299, 299, 194, 194]
    batch, _, drafts, allowed = program_inputs(TINY, plan[-1], replay=True)
    assert batch.slot.tolist() == [4, 5]
    assert drafts.shape == (2, 5) and allowed.tolist() == [5, 5]
    assert (batch.last_position >= 206).all()


def test_the_whole_model_has_every_kind():
    counts = {name: len(layers) for name, layers in kinds(FLASH).items()}
    assert counts == {
        "window": 1, "window+engram": 1, "full-2": 2, "reuse-2": 15, "full-2+engram": 1,
        "full-1": 1, "reuse-1": 15, "reindex-1": 4,
    }  # fmt: skip


def test_some_layers_keep_their_kind():
    cfg = measured_model(FLASH, "0,1,2,3,20,21,24", 1_000_000)
    kept = [layer_plan(FLASH)[i] for i in (0, 1, 2, 3, 20, 21, 24)]
    assert [(p.kind, p.ratio, p.engram, p.restricted) for p in layer_plan(cfg)] == [
        (p.kind, p.ratio, p.engram, p.restricted) for p in kept
    ]
    assert cfg.engram_num_embeddings[0] == pytest.approx(1_000_000, rel=0.01)
    whole = measured_model(FLASH, "all", 10**9)
    assert whole == FLASH


@pytest.mark.parametrize(
    ("layers", "what"),
    [("0,1", "lacks 20"), ("3,20", "lacks 2"), ("0,2,20", "must come after 20"), ("40", "below 40"),
     ("a", "like 0,1,2")],
)  # fmt: skip
def test_layers_that_make_no_model(layers, what):
    with pytest.raises(UserError, match=what):
        measured_model(FLASH, layers, 1_000_000)
