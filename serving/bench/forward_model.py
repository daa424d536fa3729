"""The model that is measured: a preset, some of its layers, Engram tables of fewer rows."""

from dataclasses import replace

from dsv41_jax.config import Config
from dsv41_jax.config_rules import primes_from
from dsv41_jax.errors import UserError
from dsv41_jax.layer_plan import LayerPlan, layer_plan


def kind(layer: LayerPlan) -> str:
    """What a layer's time depends on beside the rows."""
    name = f"{layer.kind}-{layer.ratio}" if layer.ratio else layer.kind
    return f"{name}+engram" if layer.engram else name


def kinds(cfg: Config) -> dict[str, list[int]]:
    """Kind -> its layers, in the order in which the model first has them."""
    found: dict[str, list[int]] = {}
    for layer in layer_plan(cfg):
        found.setdefault(kind(layer), []).append(layer.index)
    return found


def measured_model(cfg: Config, layers: str, engram_rows: int) -> Config:
    """The model of the layers listed ("0,1,2", or "all"), in order and counted anew, with about
    ``engram_rows`` rows an Engram table. UserError if a layer reads one that is not listed, or
    nothing comes after the last KV source.
    """
    chosen = list(range(cfg.num_hidden_layers)) if layers == "all" else _listed(cfg, layers)
    place = {layer: i for i, layer in enumerate(chosen)}

    def kept(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[i] for i in ids if i in place)

    after = [i for i in chosen if i > cfg.last_kv_source]
    if not after:
        raise UserError(f"--layers {layers}: one must come after {cfg.last_kv_source}")
    columns, engrams = cfg.engram_columns, kept(cfg.engram_layer_ids)
    first = min(cfg.engram_vocab_size, max(2, engram_rows // columns))
    primes = primes_from(first, columns * len(engrams))
    return replace(
        cfg,
        num_hidden_layers=len(chosen),
        compress_ratios=(
            *(cfg.compress_ratios[i] for i in chosen),
            *cfg.compress_ratios[cfg.num_hidden_layers :],
        ),
        kv_source_layer_ids=kept(cfg.kv_source_layer_ids),
        index_source_layer_ids=kept(cfg.index_source_layer_ids),
        candidate_source_layer_id=place[cfg.candidate_source_layer_id],
        engram_layer_ids=engrams,
        engram_vocab_size=first,
        engram_num_embeddings=tuple(
            sum(primes[i * columns : (i + 1) * columns]) for i in range(len(engrams))
        ),
        dspark_target_layer_ids=kept(tuple(after[-len(cfg.dspark_target_layer_ids) :])),
    )


def _listed(cfg: Config, text: str) -> list[int]:
    problem = f"--layers {text}: must be all, or numbers below {cfg.num_hidden_layers} like 0,1,2"
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(problem)
    chosen = sorted({int(part) for part in parts})
    if chosen[-1] >= cfg.num_hidden_layers:
        raise UserError(problem)
    plan = layer_plan(cfg)
    read = {source for i in chosen for source in (plan[i].kv_source, plan[i].index_source)}
    missing = sorted((read - {None} | {cfg.last_kv_source}) - set(chosen))
    if missing:
        listed = ",".join(map(str, missing))
        raise UserError(f"--layers {text}: lacks {listed}, which others read")
    return chosen
