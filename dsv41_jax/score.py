"""Score a token sequence: ``python -m dsv41_jax.score --checkpoint DIR (--token-ids 1,2,3 |
--text-file F)``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache, CacheShape, new_cache
from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.command import exit_status, output_file, progress_line
from dsv41_jax.compiling import jit
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.moe import repack_experts
from dsv41_jax.ops import Ops, local_ops
from dsv41_jax.prompt import check_token_ids, parse_token_ids, prompt_ids, read_text
from dsv41_jax.rows import Rows
from dsv41_jax.tokenizer import Tokenizer
from pallas_kernels.numerics import MODES, Numerics

PAGE = 64


def all_logits(
    model: Model,
    ops: Ops,
    ids: Sequence[int],
    *,
    image: Sequence[bool] | None = None,
    chunk: int = 128,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """float32 logits [T, V] of every position of one sequence: all layers on all rows, in chunks of
    ``chunk`` rows.

    image: which positions lie in image spans. ``progress(rows done)`` is called after each chunk.
    """
    cfg = model.cfg
    check_token_ids(ids, cfg)
    graph, params = nnx.split(model)
    rows_per_chunk = min(chunk, len(ids))
    padded = -(-len(ids) // rows_per_chunk) * rows_per_chunk
    shape = CacheShape(slots=1, pages=-(-padded // PAGE), page_size=PAGE)

    def forward(params: nnx.State, cache: Cache, rows: Rows) -> tuple[Cache, Array]:
        model = nnx.merge(graph, params)
        handoff, cache = model.encoder(ops, rows, cache)
        features, cache = model.decoder(ops, rows, handoff, cache)
        return cache, model.logits(ops, features.h, features.pre)[0]

    run = jit(forward, donate=(1,))
    cache, parts = new_cache(cfg, ops.numerics, shape), []
    for start in range(0, len(ids), rows_per_chunk):
        rows = _rows(ids, image, start, rows_per_chunk, shape.pages, cfg.engram_max_ngram_size - 1)
        cache, logits = run(params, cache, rows)
        parts.append(np.asarray(logits)[: len(ids) - start])
        if progress:
            progress(min(start + rows_per_chunk, len(ids)))
    return np.concatenate(parts)


def _rows(
    ids: Sequence[int],
    image: Sequence[bool] | None,
    start: int,
    count: int,
    pages: int,
    lookback: int,
) -> Rows:
    dead = np.zeros(len(ids), bool) if image is None else np.asarray(image, bool)
    history = np.concatenate([np.full(lookback, -1), np.where(dead, -1, ids)])
    piece = slice(start, start + count)
    length = min(count, len(ids) - start)
    tokens, flags = np.zeros((1, count), np.int32), np.zeros((1, count), bool)
    tokens[0, :length], flags[0, :length] = ids[piece], dead[piece]
    zero = np.zeros(1, np.int32)
    return Rows(
        tokens=tokens,
        image=flags,
        start=np.array([start], np.int32),
        length=np.array([length], np.int32),
        slot=zero,
        page_table=np.arange(pages, dtype=np.int32)[None],
        floor=zero,
        decoder_floor=zero,
        write_from=zero,
        previous=history[None, start : start + lookback].astype(np.int32),
    )


def negative_log_likelihood(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Nats of each token after the first, float32 [T-1]: logits [T, V] of position t predict token
    t + 1.
    """
    normalized = jax.nn.log_softmax(jnp.asarray(logits[:-1]), axis=-1)
    return -np.take_along_axis(np.asarray(normalized), np.asarray(ids)[1:, None], axis=1)[:, 0]


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _score(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.score", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--token-ids", metavar="1,2,3")
    source.add_argument("--text-file", metavar="F", help="UTF-8 text, scored behind a BOS")
    parser.add_argument(
        "--numerics", choices=tuple(MODES), help="default: reference on a CPU, serving on a GPU"
    )
    parser.add_argument("--logits-out", metavar="F.npy", help="float32 logits [T, V]")
    return parser


def default_numerics(name: str | None) -> Numerics:
    """The named mode; without a name ``serving`` on a GPU and ``reference`` elsewhere."""
    return Numerics.named(name or ("serving" if jax.default_backend() == "gpu" else "reference"))


def _score(arguments: argparse.Namespace) -> None:
    if arguments.logits_out:
        with output_file(arguments.logits_out) as file:
            np.save(file, _run(arguments))
    else:
        _run(arguments)


def _run(arguments: argparse.Namespace) -> np.ndarray:
    text = None if arguments.text_file is None else read_text(arguments.text_file)
    given = None if arguments.token_ids is None else parse_token_ids(arguments.token_ids)
    numerics = default_numerics(arguments.numerics)
    model = load_model(arguments.checkpoint, numerics=numerics)
    repack_experts(model)
    ids = (
        given
        if text is None
        else prompt_ids(Tokenizer.from_dir(arguments.checkpoint, model.cfg), text)
    )
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens: at least 2 are needed to score one")
    logits = all_logits(
        model,
        local_ops(numerics),
        ids,
        progress=lambda done: progress_line(f"{done} of {len(ids)} tokens"),
    )
    mean = float(np.mean(negative_log_likelihood(logits, ids)))
    print(f"tokens {len(ids)}  mean nll {mean:.6f} nats  perplexity {np.exp(mean):.6f}")
    return logits


if __name__ == "__main__":
    sys.exit(main())
