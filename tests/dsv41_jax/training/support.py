"""Models small enough to compile and to train in a test."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer, token_map
from dsv41_jax.training.data import Corpus
from dsv41_jax.training.optimiser import Recipe
from dsv41_jax.training.run import Options, Run
from dsv41_jax.training.tokenizer import train_tokenizer
from pallas_kernels.numerics import FLOAT32

TINY = Config.preset("tiny")
# Full at ratio 2, Full at ratio 1 with candidates and Engram, Reindex; one draft stage.
SMALL = replace(
    TINY,
    vocab_size=288,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=32,
    o_lora_rank=32,
    n_routed_experts=4,
    compress_ratios=(2, 1, 1, 0),
    kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1, 2),
    index_n_heads=4,
    candidate_source_layer_id=1,
    hc_mult=2,
    hc_sinkhorn_iters=2,
    engram_layer_ids=TINY.engram_layer_ids[:1],
    engram_num_embeddings=(61,),
    engram_max_ngram_size=2,
    engram_n_heads=1,
    engram_compressed_vocab_size=255,
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(2,),
    dspark_noise_token_id=3,
    image_token_id=4,
)
TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen jugs. "
# One layer, Full with candidates and Engram, and one draft stage: what trains within a test.
ONE = replace(
    SMALL,
    num_hidden_layers=1,
    compress_ratios=(1, 0),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0,),
    candidate_source_layer_id=0,
    engram_layer_ids=(0,),
    dspark_target_layer_ids=(0,),
)
BACKEND = train_tokenizer([TEXT], SMALL.vocab_size)
TOKENIZER = Tokenizer(BACKEND, bos_token_id=SMALL.bos_token_id)
TOKEN_MAP = token_map(TOKENIZER, SMALL)[0]


def toy_corpus() -> Corpus:
    """A few sentences over and over, with a BOS now and then."""
    ids = np.array(TOKENIZER.encode(TEXT, bos=False) * 100, np.uint16)
    ids[::400] = SMALL.bos_token_id
    return Corpus(ids, ids[:600].copy())


def new_run(out: Path, cfg: Config = ONE, *, seed: int = 0, rounded: float = 0.0) -> Run:
    recipe = Recipe(peak=5e-3, warm=5, dense=0.3, rounded=rounded)
    options = Options(
        rows=32, count=2, steps=30, every=12, seed=seed,
        remat=False, numerics=FLOAT32, recipe=recipe,
    )  # fmt: skip
    return Run(cfg, TOKEN_MAP, toy_corpus(), out, options)
