"""What the numbers of a config may be: types, ranges, and how the fields fit together.

Works on a plain mapping `field -> value` (vision fields are `vision.<name>`), so that one bad or
missing field does not hide the others. Lists are lists; nothing here knows the Config class.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from dsv41_jax.errors import shorten

_INT_MAX = 2**31 - 1
_MAY_BE_ZERO = {
    "num_nextn_predict_layers", "candidate_source_layer_id", "vision.num_hidden_layers",
    "engram_pad_token_id", "dspark_noise_token_id", "bos_token_id", "eos_token_id",
    "pad_token_id", "image_token_id",
}  # fmt: skip
# Caps on counts keep a hostile config from asking for an endless tensor list.
_CAPS = {
    "num_hidden_layers": 1024,
    "num_nextn_predict_layers": 64,
    "vision.num_hidden_layers": 1024,
    "n_routed_experts": 8192,
    "dspark_n_routed_experts": 8192,
    "engram_max_ngram_size": 16,
    "engram_n_heads": 64,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 10_000,
}
_PRIME_LIMIT = 2**24


@lru_cache
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The `count` smallest primes that are at least `start`."""
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < count:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return tuple(found)


def check_values(
    values: Mapping[str, Any], types: Mapping[str, Any], paths: Mapping[str, str]
) -> list[str]:
    """Every fault among `values`, a line each: the field's path, its value, what is allowed."""
    problems = []
    sound = {}
    for name, value in values.items():
        allowed = _type_fault(name, value, types[name])
        if allowed:
            problems.append(f"{paths[name]} = {shorten(value)}: must be {allowed}")
        else:
            sound[name] = value
    for rule in _RULES:
        names = rule.fields.split()
        if not all(name in sound for name in names):
            continue
        arguments = [sound[name] for name in names]
        if not rule.holds(*arguments):
            others = ", ".join(f"{paths[n]} = {shorten(sound[n])}" for n in names[1:])
            problems.append(
                f"{paths[names[0]]} = {shorten(arguments[0])}: must {rule.must}"
                + (f" (with {others})" if others else "")
            )
    return problems


def _type_fault(name: str, value: Any, kind: Any) -> str | None:
    """What is allowed, if `value` is not of the plausible type and range; else None."""
    low = 0 if name in _MAY_BE_ZERO else 1
    high = _CAPS.get(name, _INT_MAX)
    if kind is int:
        return None if _is_int(value, low, high) else f"an integer from {low} to {high}"
    if kind is str:
        return None if isinstance(value, str) else "a string"
    if kind is float or kind == (float | None):
        fine = _is_positive_number(value) or (value is None and kind is not float)
        return None if fine else "a positive finite number" + (" or null" * (kind is not float))
    fine = isinstance(value, list) and all(_is_int(v, 0, _INT_MAX) for v in value)
    return None if fine else f"a list of integers from 0 to {_INT_MAX}"


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_positive_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return 0 < value <= 1e300


def _ascending(ids: list[int], end: int) -> bool:
    """Strictly ascending layer numbers below `end`."""
    return all(a < b for a, b in pairwise(ids)) and all(i < end for i in ids)


def _compressed(ids: list[int], ratios: list[int]) -> bool:
    return all(i < len(ratios) and ratios[i] > 0 for i in ids)


def _ratios_follow_sources(ratios: list[int], sources: list[int], layers: int) -> bool:
    """A compressed layer has the ratio of the last KV source at or before it."""
    if len(ratios) < layers or any(s >= layers for s in sources):
        return True
    owners = [max((s for s in sources if s <= i), default=-1) for i in range(layers)]
    return all(
        ratio == 0 or (owner >= 0 and ratio == ratios[owner])
        for ratio, owner in zip(ratios, owners, strict=False)
    )


def _engram_rows(rows: list[int], start: int, ngram: int, heads: int, layers: list[int]) -> bool:
    columns = (ngram - 1) * heads
    if start >= _PRIME_LIMIT or len(rows) != len(layers) or columns * len(rows) > 4096:
        return True
    primes = primes_from(start, columns * len(rows))
    return rows == [sum(primes[i * columns : (i + 1) * columns]) for i in range(len(rows))]


def _primes_fit(start: int, ngram: int, heads: int, layers: list[int]) -> bool:
    count = (ngram - 1) * heads * len(layers)
    if start >= _PRIME_LIMIT or count > 4096:
        return False
    return count == 0 or primes_from(start, count)[-1] < _PRIME_LIMIT


class _Rule(NamedTuple):
    fields: str
    must: str
    holds: Callable[..., bool]


def _multiple_of_32(name: str) -> _Rule:
    return _Rule(name, "be a multiple of 32 (the scale block)", lambda n: n % 32 == 0)


def _token(name: str) -> _Rule:
    return _Rule(f"{name} vocab_size", "be below vocab_size", lambda i, v: i < v)


def _at_most(name: str, other: str) -> _Rule:
    return _Rule(f"{name} {other}", f"be at most {other}", lambda a, b: a <= b)


_RULES = (
    *map(_multiple_of_32, ("hidden_size", "moe_intermediate_size", "head_dim")),
    *map(_multiple_of_32, ("q_lora_rank", "o_lora_rank", "index_head_dim", "engram_head_dim")),
    _Rule("qk_rope_head_dim", "be even", lambda n: n % 2 == 0),
    _at_most("qk_rope_head_dim", "head_dim"),
    _at_most("qk_rope_head_dim", "index_head_dim"),
    _Rule("o_groups num_attention_heads", "divide num_attention_heads", lambda g, h: h % g == 0),
    _at_most("rope_beta_slow", "rope_beta_fast"),
    _Rule("rope_factor", "be at least 1", lambda f: f >= 1),
    _Rule("rope_theta", "be above 1", lambda t: t > 1),
    _Rule("compress_rope_theta", "be above 1", lambda t: t > 1),
    _at_most("num_experts_per_tok", "n_routed_experts"),
    _at_most("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    _Rule("compress_ratios", "hold only 0, 1 and 2", lambda r: set(r) <= {0, 1, 2}),
    _Rule(
        "compress_ratios num_hidden_layers num_nextn_predict_layers",
        "have num_hidden_layers + num_nextn_predict_layers entries, 0 for the draft layers",
        lambda r, n, m: len(r) == n + m and not any(r[n:]),
    ),
    _Rule(
        "kv_source_layer_ids num_hidden_layers",
        "be one or more ascending layer numbers",
        lambda ids, n: bool(ids) and _ascending(ids, n),
    ),
    _Rule(
        "kv_source_layer_ids compress_ratios", "have compress_ratios of 1 or 2 there", _compressed
    ),
    _Rule(
        "compress_ratios kv_source_layer_ids num_hidden_layers",
        "be 0, or the ratio of the last KV source at or before the layer",
        _ratios_follow_sources,
    ),
    _Rule("index_source_layer_ids num_hidden_layers", "be ascending layer numbers", _ascending),
    _Rule(
        "index_source_layer_ids compress_ratios",
        "have compress_ratios of 1 or 2 there",
        _compressed,
    ),
    _Rule(
        "index_source_layer_ids kv_source_layer_ids",
        "contain every KV source",
        lambda ids, sources: set(sources) <= set(ids),
    ),
    _Rule(
        "candidate_source_layer_id kv_source_layer_ids",
        "be the last KV source",
        lambda i, sources: i == max(sources, default=-1),
    ),
    _Rule("engram_layer_ids num_hidden_layers", "be ascending layer numbers", _ascending),
    _Rule(
        "engram_num_embeddings engram_layer_ids",
        "have one entry for each Engram layer",
        lambda rows, ids: len(rows) == len(ids),
    ),
    _Rule("engram_max_ngram_size", "be at least 2", lambda n: n >= 2),
    _Rule(
        "engram_vocab_size engram_max_ngram_size engram_n_heads engram_layer_ids",
        "give table sizes (primes from engram_vocab_size on) below 2^24",
        _primes_fit,
    ),
    _Rule(
        "engram_num_embeddings engram_vocab_size engram_max_ngram_size engram_n_heads "
        "engram_layer_ids",
        "be the sums of the primes from engram_vocab_size on",
        _engram_rows,
    ),
    _at_most("engram_compressed_vocab_size", "vocab_size"),
    *map(_token, ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")),
    *map(_token, ("engram_pad_token_id", "dspark_noise_token_id")),
    _Rule(
        "dspark_target_layer_ids num_hidden_layers num_nextn_predict_layers",
        "be ascending layer numbers, one or more when there are draft layers",
        lambda ids, n, m: _ascending(ids, n) and (bool(ids) or m == 0),
    ),
    _Rule(
        "vision.hidden_size vision.num_attention_heads",
        "be a multiple of num_attention_heads",
        lambda d, h: d % h == 0,
    ),
)
