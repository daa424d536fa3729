"""``serving.bench sampling`` on a small vocabulary."""

import json

import jax.numpy as jnp
import pytest

from serving.bench import sampling
from serving.bench.__main__ import main


@pytest.mark.slow
def test_every_option(tmp_path, capsys, monkeypatch):
    """A search that keeps other ids gives status 1."""
    path, ours = tmp_path / "rows.json", ["sampling", "--batch", "2", "--vocabulary", "64"]
    assert main([*ours, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["options"] for row in rows] == list(sampling.OPTIONS)
    assert all(row["us"] > 0 and row["moved"] == 0 for row in rows)
    assert "top-k, top-p" in capsys.readouterr().out
    monkeypatch.setattr(
        sampling, "kept_by_search", lambda scaled, *_: jnp.zeros(scaled.shape, bool)
    )
    monkeypatch.setattr(sampling, "OPTIONS", {"top-k": sampling.OPTIONS["top-k"]})
    with pytest.raises(SystemExit, match="1"):
        main(ours)


def test_bad_input(capsys):
    assert main(["sampling", "--batch", "0"]) == 2
    assert "--batch 0" in capsys.readouterr().err
