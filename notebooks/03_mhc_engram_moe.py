# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # mHC, Engram and the experts
#
# Three parts that most transformers do not have in this form, each seen at work on a text: residual
# streams that mix, a hashed n-gram memory, and a router.

# %%
import matplotlib.pyplot as plt
import numpy as np

from dsv41_jax.engram_hash import HashConstants, hash_rows_host
from dsv41_jax.tokenizer import token_map
from dsv41_jax.trace import Tracer
from pallas_kernels.mhc.ref import sinkhorn
from pallas_kernels.numerics import FLOAT32
from serving.generate import load

# %%
loaded = load("../checkpoints/mini", FLOAT32)
cfg, tokenizer = loaded.model.cfg, loaded.tokenizer
with open("text.txt", encoding="utf-8") as file:
    ids = tokenizer.encode(file.read())[:1024]
tracer = Tracer(loaded.model, loaded.ops, ids)
layers = [*tracer.encoder(), *tracer.decoder()[0]]

# %% [markdown]
# ## mHC: four residual streams
#
# A sublayer reads one mixture of the four streams and writes to all of them; before that the
# streams themselves are mixed by a 4 x 4 matrix, made anew for every token. Below its mean over the
# text, for the attention and the experts of every layer: row = from stream, column = to stream.

# %%
count = cfg.num_hidden_layers
figure, axes = plt.subplots(2, count, figsize=(11, 2.1), layout="constrained")
for index, trace in enumerate(layers):
    for row in range(2):
        mean = np.asarray(trace.mixing[row]).mean(axis=0)
        axes[row, index].imshow(mean, cmap="Purples", vmin=0, vmax=1)
        axes[row, index].set(xticks=[], yticks=[])
    axes[0, index].set_title(index, fontsize=8)
axes[0, 0].set_ylabel("attention", fontsize=8)
axes[1, 0].set_ylabel("experts", fontsize=8)
plt.show()

# %% [markdown]
# The matrices are doubly stochastic: what flows out of a stream and into a stream adds up to one,
# so depth neither amplifies nor fades the residual. Sinkhorn iterations make them so, 20 of them;
# they end on the columns, and this is how far the rows are off after so many.

# %%
raw = 3 * np.random.default_rng(0).standard_normal((1000, 4, 4)).astype(np.float32)
off = []
for iters in range(1, cfg.hc_sinkhorn_iters + 1):
    rows = np.asarray(sinkhorn(raw, iters=iters, eps=cfg.hc_eps)).sum(axis=-1)
    off.append(np.abs(rows - 1).max(axis=-1))
figure, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
axes.semilogy(range(1, len(off) + 1), np.median(off, axis=1), "o-", label="median")
axes.semilogy(range(1, len(off) + 1), np.max(off, axis=1), "o-", label="worst of 1000")
axes.set(xlabel="Sinkhorn iterations", ylabel="|row sum - 1|")
axes.legend()
plt.show()

# %% [markdown]
# ## Engram: a memory keyed by n-grams
#
# The last two, three and four tokens are hashed to rows of a table; nothing but token ids goes in,
# so the rows of a prompt are known before it runs. Tokens that differ in case or blanks only count
# as one.

# %%
mapped, pad = token_map(tokenizer, cfg)
constants = HashConstants.of(cfg, cfg.engram_layer_ids[0])


def rows(text):
    tokens = np.array(tokenizer.encode(text))
    return hash_rows_host(tokens, np.zeros(len(tokens), bool), constants, mapped, pad)[-1]


print(f"{constants.rows:,} rows; those of the last token of two texts:")
print(one := rows("before the function is called"))
print(two := rows("whether The Function is called"))
print("equal columns:", (one == two).tolist())

# %% [markdown]
# A gate for each stream decides how much of the looked-up value the token takes. The first tokens
# of the text, and the gates of both Engram layers:

# %%
shown = slice(1, 61)
words = [tokenizer.decode([i]) for i in ids[shown]]
figure, axes = plt.subplots(2, 1, figsize=(11, 2.9), sharex=True, layout="constrained")
for panel, index in zip(axes, cfg.engram_layer_ids, strict=True):
    gates = np.asarray(layers[index].gate)[shown].T
    image = panel.imshow(gates, cmap="Reds", vmin=0, vmax=1, aspect="auto")
    panel.set(ylabel=f"layer {index}\nstream", yticks=range(4))
axes[1].set_xticks(range(len(words)), [repr(w)[1:-1] for w in words], rotation=90, fontsize=6)
figure.colorbar(image, ax=axes)
plt.show()

# %% [markdown]
# ## Experts
#
# The share of the text's tokens that each expert of each layer works on. A selection bias, trained
# apart from the loss, keeps this even over the training text; on one text it is not.

# %%
chosen = [np.asarray(trace.experts) for trace in layers]
load_ = [np.bincount(e.ravel(), minlength=cfg.n_routed_experts) / len(ids) for e in chosen]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
image = axes.imshow(load_, cmap="viridis", vmin=0, aspect="auto")
axes.set(xlabel="expert", ylabel="layer", yticks=range(count))
figure.colorbar(image, label="share of tokens")
plt.show()
even = cfg.num_experts_per_tok / cfg.n_routed_experts
print(f"evenly it would be {even:.2f}; the busiest expert of a layer has {np.max(load_):.2f}")
sums = np.concatenate([np.asarray(trace.weights).sum(axis=-1) for trace in layers])
print(f"weights of a token's {cfg.num_experts_per_tok} experts add up to {sums.mean():.4f}")
