"""The n-gram baseline is a probability distribution, and a sensible one."""

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from dsv41_jax.training.ngram import KneserNey, main

RNG = np.random.default_rng(0)
IDS = RNG.choice(8, 400, p=np.arange(1, 9) / 36).astype(np.uint16)


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_probabilities_sum_to_one(longest):
    """After contexts that were seen, and after one that was not."""
    model = KneserNey(IDS, 8, longest)
    contexts = [IDS[:4], IDS[100:104], np.array([0, 0, 0, 0])]
    for context in contexts:
        rows = [np.array([*context[: longest - 1], token]) for token in range(8)]
        total = sum(np.exp(-model.nats(row)[0]) for row in rows)
        assert total == pytest.approx(1, abs=1e-12)


def test_longer_contexts_learn_a_pattern():
    pattern = np.tile(np.array([1, 2, 1, 3], np.uint16), 100)
    nats = [KneserNey(pattern, 8, n).nats(pattern).mean() for n in (1, 2, 3)]
    assert nats[0] > nats[1] > nats[2] and nats[2] < 0.05


def test_a_single_token_counts_by_frequency():
    """Order 1 of order 1: (count - 0.75) / n plus the discount, spread evenly."""
    counts = np.bincount(IDS, minlength=8)
    got = np.exp(-KneserNey(IDS, 8, 1).nats(np.arange(8)))
    want = (counts - 0.75) / 400 + 0.75 * 8 / 400 / 8
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_the_command(capsys, tmp_path):
    np.savez(tmp_path / "data.npz", train=IDS, held_out=IDS[:50])
    arguments = ["--data", str(tmp_path / "data.npz"), "--vocab-size"]
    assert main([*arguments, "8"]) == 0
    assert capsys.readouterr().out.startswith("5-gram  tokens 46  mean nll ")
    with pytest.raises(UserError, match="at most 4096"):
        KneserNey(IDS, 5000)
    assert main([*arguments, "5000"]) == 2
