"""The model card: what was trained on what, how it went, and what it is not for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv41_jax.config import Config
from dsv41_jax.training.export import bytes_by_kind

_TEXT = """# {name}: a small model of the DeepSeek-V4.1-Flash architecture

{parameters:,} parameters ({size:.1f} MB in the released FP8 and FP4 encodings): {layers} layers
of which {encoder} are the encoder half, width {width}, {experts} experts ({chosen} a token), a
window of {window}, Engram at layers {engram}, {stages} draft stages. It exists to try the engine
and to measure its approximations on text that was learned; it is no assistant and knows nothing
but documentation.

| parameters of | number | MB |
|---|---|---|
{kinds}

## Data
{train:,} tokens of its own byte-level BPE ({vocabulary} ids) from the documentation of the packages
below; {held_out:,} more tokens, documents chosen by a hash of their names, are held out. Paragraphs
of {repeated} characters and more occur once. The weights are under the project's licence.

| package | version | licence | text, MB |
|---|---|---|---|
{sources}

## Training
{steps:,} steps of {tokens_a_step:,} tokens ({seen:,} tokens, {epochs:.1f} passes) in {minutes:.1f}
minutes on {device}; Muon for matrices, Adam for the rest, peak rate {peak}. The first {dense:.0%}
of the steps attend to every entry while the index learns, the last {rounded:.0%} round weights and
caches as the checkpoint stores them. Losses in nats:

| step | token | index | draft | busiest expert |
|---|---|---|---|---|
{curve}

Held-out text, {measured:,} tokens in sequences of {rows}: perplexity {plain:.3f} with float32
weights, {rounded_perplexity:.3f} with weights and caches as released. A 5-gram model of the same
training tokens has {ngram:.3f} on all of the held-out ones.

## Limits
Trained on sequences of {rows} tokens; longer contexts are untested. English technical text only; no
chat training: the role tokens exist but were never seen. Facts, code and figures that it prints are
made up.
"""


def model_card(
    name: str, cfg: Config, record: Mapping[str, Any], sources: Mapping[str, Any]
) -> str:
    """Markdown from a run's record and from what ``corpus`` wrote about the data."""
    kinds = bytes_by_kind(cfg)
    tokens, held_out = sources["tokens"], record["held_out"]
    seen = record["steps"] * record["tokens_a_step"]
    fields = {
        "name": name,
        "parameters": sum(count for count, _ in kinds.values()),
        "size": sum(size for _, size in kinds.values()) / 1e6,
        "layers": cfg.num_hidden_layers,
        "encoder": cfg.last_kv_source,
        "width": cfg.hidden_size,
        "experts": cfg.n_routed_experts,
        "chosen": cfg.num_experts_per_tok,
        "window": cfg.sliding_window,
        "engram": " and ".join(map(str, cfg.engram_layer_ids)),
        "stages": cfg.num_nextn_predict_layers,
        "kinds": _rows((kind, f"{n:,}", f"{size / 1e6:.2f}") for kind, (n, size) in kinds.items()),
        "train": tokens["train"],
        "held_out": tokens["held_out"],
        "vocabulary": cfg.vocab_size,
        "repeated": sources["repeated_from"],
        "sources": _rows(
            (s["package"], s["version"], s["licence"], f"{s['bytes'] / 1e6:.2f}")
            for s in sources["sources"]
        ),
        "seen": seen,
        "epochs": seen / tokens["train"],
        "minutes": record["seconds"] / 60,
        "curve": _rows(
            (line["step"], *(f"{line[key]:.3f}" for key in ("token", "index", "draft", "busiest")))
            for line in _sampled(record["log"], 12)
        ),
        "measured": held_out["tokens"],
        "plain": held_out["plain_perplexity"],
        "rounded_perplexity": held_out["rounded_perplexity"],
        "ngram": held_out["ngram_perplexity"],
    }
    recipe = {key: record["recipe"][key] for key in ("peak", "dense", "rounded")}
    return _TEXT.format(
        **{key: record[key] for key in ("steps", "tokens_a_step", "rows", "device")},
        **recipe,
        **fields,
    )


def write_card(name: str, cfg: Config, directory: Path, sources_file: Path) -> None:
    """README.md in a checkpoint directory that holds record.json."""
    record = json.loads((directory / "record.json").read_text("utf-8"))
    sources = json.loads(sources_file.read_text("utf-8"))
    (directory / "README.md").write_text(model_card(name, cfg, record, sources), "utf-8")


def _rows(rows: Any) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _sampled(log: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most ``count`` lines of a log, evenly, the last one included."""
    stride = max(1, -(-len(log) // count))
    return log[::-1][::stride][::-1]
