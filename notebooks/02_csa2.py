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
# # CSA2: what one token attends to
#
# Compressed sparse attention, drawn from a forward of the small checkpoint: the window, the entries
# that the index selects, and the candidate blocks that later selections must stay inside.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.trace import Tracer
from pallas_kernels.numerics import FLOAT32
from serving.generate import load

# %%
loaded = load("../checkpoints/mini", FLOAT32)
cfg, plan = loaded.model.cfg, layer_plan(loaded.model.cfg)
with open("text.txt", encoding="utf-8") as file:
    text = file.read()
ids = loaded.tokenizer.encode(text)[:1024]

# %% [markdown]
# `Tracer` runs a sequence through both halves of the model and keeps, for every layer, what its
# attention was told to read.

# %%
tracer = Tracer(loaded.model, loaded.ops, ids)
encoder = tracer.encoder()
decoder, logits = tracer.decoder()
layers = [*encoder, *decoder]
for layer, trace in zip(plan, layers, strict=True):
    held = "nothing global" if trace.selected is None else f"up to {trace.selected.shape[1]}"
    print(f"layer {layer.index:2} {layer.kind:8} ratio {layer.ratio}: {held}")

# %% [markdown]
# ## One token
#
# The last token of the text. Orange: its window, in every layer. Blue: the selected entries, at the
# first token that each of them stands for. Grey: the candidate blocks.

# %%
token, size, ratio = len(ids) - 1, cfg.candidate_block_size, [layer.ratio for layer in plan]
blocks = np.asarray(tracer.candidates())[token]
figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
for y, trace in enumerate(layers):
    if y >= cfg.candidate_source_layer_id:
        spans = [(block * size, size) for block in blocks[blocks >= 0]]
        axes.broken_barh(spans, (y - 0.45, 0.9), color="lightgrey")
    if trace.selected is not None:
        entries = np.asarray(trace.selected)[token]
        axes.plot(entries[entries >= 0] * ratio[y], [y] * sum(entries >= 0), "|", ms=9)
    axes.barh(y, cfg.sliding_window, left=token + 1 - cfg.sliding_window, color="orange", alpha=0.5)
axes.set(yticks=range(len(plan)), xlabel="position", ylabel="layer", xlim=(0, token + 1))
axes.invert_yaxis()
plt.show()

# %% [markdown]
# What layer 6 (ratio 1: an entry is a token) selected for it of the first 300 tokens, in brackets.

# %%
source = plan[cfg.candidate_source_layer_id]
chosen = set(np.asarray(layers[source.index].selected)[token].tolist())
words = [loaded.tokenizer.decode([i]) for i in ids[1:300]]
marked = [f"[{w}]" if p in chosen else w for p, w in enumerate(words, start=1)]
print("".join(marked))

# %% [markdown]
# ## Every token
#
# Rows are tokens, columns entries; darkness is the share of a square's pairs that are selected.
# Below index_topk entries every visible one is selected, so the pictures begin as full triangles;
# from there on the index has to choose.

# %%
shown = [layer.index for layer in plan if layer.selects]
figure, axes = plt.subplots(1, len(shown), figsize=(11, 2.7), layout="constrained")
for index, panel in zip(shown, axes, strict=True):
    columns = len(ids) // ratio[index]
    mask = np.zeros((len(ids), columns + 1))
    np.put_along_axis(mask, np.asarray(layers[index].selected), 1, axis=1)
    squares, extent = mask[:, :-1].reshape(64, 16, 64, -1).mean((1, 3)), (0, columns, len(ids), 0)
    panel.imshow(squares, "Blues", aspect="auto", interpolation="nearest", extent=extent)
    panel.set(title=f"layer {index}, ratio {ratio[index]}", xlabel="entry")
axes[0].set_ylabel("token")
plt.show()
tokens = [len(loaded.tokenizer.encode(text[: text.index(x)])) for x in ("import d", "If the s")]
print(f"tokens {tokens[0]} to {tokens[1]} are a code example")

# %% [markdown]
# How much do selections differ? Layers between two sources read the same list; this is the share
# of a source's picks that the one before it over the same cache had picked too.

# %%
late = slice(len(ids) // 2, None)
for a, b in pairwise(shown):
    if plan[a].kv_source == plan[b].kv_source:
        pairs = zip(layers[a].selected[late], layers[b].selected[late], strict=True)
        shared = [np.isin(np.asarray(y), np.asarray(x)).mean() for x, y in pairs]
        print(f"layer {b} picks again {np.mean(shared):.0%} of layer {a}'s entries")

# %% [markdown]
# ## What candidates save
#
# Scoring is the part that grows with the context. In the release the layers 24, 28, 32 and 36 score
# only the candidates of layer 20: keys read for one decoded token, with and without.

# %%
flash = Config.preset("flash")
contexts = np.array([2**n for n in range(12, 21)])
most = flash.candidate_topk_blocks * flash.candidate_block_size
sources = [layer for layer in layer_plan(flash) if layer.selects]
every = sum(contexts // layer.ratio for layer in sources)
kept = sum(np.minimum(contexts // x.ratio, most if x.restricted else 2**20) for x in sources)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.loglog(contexts, every, "o-", label="all visible keys in every index layer")
axes.loglog(contexts, kept, "o-", label=f"at most {most:,} candidates after layer 20")
axes.set(xlabel="context", ylabel="index keys a token")
axes.legend()
plt.show()
print(f"at {contexts[-1]:,} tokens {every[-1]:,} keys become {kept[-1]:,}")
