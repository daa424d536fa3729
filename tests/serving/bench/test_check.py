"""``serving.bench check``: a wrong operation is found, a right one is not."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax.numpy as jnp
import pytest

from dsv41_jax.config import Config
from dsv41_jax.ops import local_ops
from pallas_kernels.numerics import SERVING
from serving.bench import check_models as module
from serving.bench.__main__ import main
from serving.bench.check import Check
from serving.bench.check_compare import Compared, Tolerance, compared, compared_picks
from serving.bench.check_models import RandomModels
from serving.bench.forward_model import measured_model

SMALL = ["check", "--preset", "tiny", "--layers", "4,5", "--weight-sets", "1", "--jobs", "1"]
LIMIT = Tolerance(rel=0.1, cosine=0.99, stored_rel=0.2)


def test_rows_are_compared_by_the_worst():
    want = jnp.asarray([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    same = compared("x", want, want)
    assert (same.rows, same.rel, same.cosine, same.overall) == (3, 0, 1, 0) and same.within(LIMIT)
    off = compared("x", want.at[1, 0].set(2), want)
    assert off.rel == pytest.approx(1) and off.cosine == pytest.approx(0.5**0.5)
    assert off.overall == pytest.approx(2 / 29**0.5) and not off.within(LIMIT)
    for value in (jnp.nan, jnp.inf):
        assert not compared("x", want.at[1, 0].set(value), want).within(LIMIT)
    assert not compared("x", want.at[2, 0].set(1), want).within(LIMIT)
    stored = Compared("x", 3, rel=0.5, cosine=0.9, overall=0.1, stored=True)
    assert stored.within(LIMIT) and not replace(stored, overall=0.3).within(LIMIT)


def test_picks_are_compared_in_whatever_order():
    want = [(jnp.asarray([[3, 1, -1], [4, 2, 0]]),)]
    assert compared_picks("x", [(jnp.asarray([[1, 3, -1], [0, 2, 4]]),)], want).different == 0
    off = compared_picks("x", [(jnp.asarray([[1, 5, 3], [0, 7, 6]]),)], want)
    assert (off.picks, off.different) == (5, 2) and not off.within(LIMIT)
    assert off.within(replace(LIMIT, picks=0.4))


@pytest.mark.slow
def test_a_wrong_operation_is_found():
    """In the outputs, and in the rows that it wrote to the cache."""
    cfg = measured_model(Config.preset("tiny"), "4,5", 100)
    check = Check(RandomModels(cfg, 1), ("decode=2*1@8",), 1)
    right = local_ops(SERVING, "reference")
    (case,) = check.cases

    def result(ops):
        with ThreadPoolExecutor(1) as pool:
            side = check.side(ops, "reference", pool)
            side.compile(check.dispatches(case))
            return check.result(side, case)

    def store_rows(chunk, *, window, **options):
        return right.store_rows(chunk, window=replace(window, x=-window.x), **options)

    one, two = result(replace(right, store_rows=store_rows)), result(right)
    assert all(value.within(module.NEAR) for value in check.values(case, two, two))
    values = {value.name: value for value in check.values(case, one, two)}
    failed = {name for name, value in values.items() if not value.within(module.NEAR)}
    rings = {f"windows[{i}].rows" for i in (0, 1)}
    assert failed >= {"decode, head input", "decode, logits", *rings}
    rows = values["windows[0].rows"]
    assert isinstance(rows, Compared) and rows.rows == 2
    assert not any(name.endswith("differ") for name in failed)


@pytest.mark.slow
def test_every_phase_of_the_command(capsys, monkeypatch):
    """Against itself nothing is off; a limit that nothing keeps gives status 1."""
    ours = ["--layers", "1,2,3,4,5,6", "--weight-sets", "2", "--case", "verify=2*6@60:5"]
    ours += ["--case", "draft=1*1@60", "--case", "prompt=1*40@100c"]
    assert main([*SMALL, *ours]) == 0
    shown = capsys.readouterr().out
    assert "0 values are outside their limits" in shown and "FAIL" not in shown
    for name in ("verify, logits", "draft, logits", "prefill_full, logits", "replay, logits"):
        assert name in shown
    assert "carry.rows.h: 64 rows" in shown  # four streams of a window
    monkeypatch.setattr(module, "FAR", Tolerance(rel=-1, cosine=2, stored_rel=-1))
    with pytest.raises(SystemExit) as status:
        main([*SMALL, "--case", "decode=1*1@60"])
    assert status.value.code == 1
    assert "FAIL decode, logits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--case", "x"], "--case x: must be NAME"),
        (["--case", "x=1*1@500"], "--case of 500 tokens: must be at most 128"),
        (["--layers", "5"], "lacks 4"),
        (["--weight-sets", "0"], "--weight-sets 0: must be at least 1"),
        (["--goldens", "x"], "--goldens: needs --checkpoint"),
        (["--checkpoint", "x", "--kernels", "mosaic"], "--kernels mosaic: must be auto with"),
    ],
)
def test_bad_input(arguments, what, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert what in capsys.readouterr().err
