"""Who reads whom: the table of ARCHITECTURE section 3."""

from dsv41_jax.config import Config
from dsv41_jax.layer_plan import layer_plan

FLASH, TINY = (layer_plan(Config.preset(name)) for name in ("flash", "tiny"))


def kinds(plan) -> dict[str, list[int]]:
    names = ("window", "full", "reindex", "reuse")
    return {kind: [p.index for p in plan if p.kind == kind] for kind in names}


def test_kinds_of_the_release():
    found = kinds(FLASH)
    assert found["window"] == [0, 1]
    assert found["full"] == [2, 8, 14, 20]
    assert found["reindex"] == [24, 28, 32, 36]
    assert len(found["reuse"]) == 30 and len(FLASH) == 40


def test_sources_of_the_release():
    for plan in FLASH:
        i = plan.index
        kv = None if i < 2 else max(s for s in (2, 8, 14, 20) if s <= i)
        index = None if i < 2 else max(s for s in (2, 8, 14, 20, 24, 28, 32, 36) if s <= i)
        assert (plan.kv_source, plan.index_source) == (kv, index)
        assert plan.ratio == (0 if i < 2 else 2 if i < 20 else 1)
        assert plan.owns_kv == (kv == i) and plan.selects == (index == i)


def test_candidates_and_engram_of_the_release():
    assert [p.index for p in FLASH if p.candidate_source] == [20]
    assert [p.index for p in FLASH if p.restricted] == [24, 28, 32, 36]
    assert [p.index for p in FLASH if p.engram] == [1, 14]


def test_tiny():
    assert kinds(TINY) == {"window": [0, 1], "full": [2, 4], "reindex": [6], "reuse": [3, 5, 7]}
    assert [p.kv_source for p in TINY] == [None, None, 2, 2, 4, 4, 4, 4]
    assert [p.index_source for p in TINY] == [None, None, 2, 2, 4, 4, 6, 6]
    assert [p.engram for p in TINY] == [False, True, True] + [False] * 5
