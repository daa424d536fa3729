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
# # Bounded replay
#
# The layers after the last KV source run on the last window of a prompt only. Their windows then
# begin at the first of those rows, which is an approximation: here is how large it is, layer by
# layer and token by token, and what it saves.

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.trace import Tracer
from pallas_kernels.numerics import FLOAT32
from serving.generate import load
from sharding.estimate import ShardedModel
from sharding.hardware import hardware
from sharding.layouts import layout
from sharding.roofline import Step

# %%
loaded = load("../checkpoints/mini", FLOAT32)
cfg, window = loaded.model.cfg, loaded.model.cfg.sliding_window
with open("text.txt", encoding="utf-8") as file:
    ids = loaded.tokenizer.encode(file.read())[:1024]
tracer = Tracer(loaded.model, loaded.ops, ids)
encoder = tracer.encoder()
exact, exact_logits = tracer.decoder()
replayed, logits = tracer.decoder(window)
print(f"{len(ids)} rows up to layer {cfg.last_kv_source};", end=" ")
print(f"behind it {len(exact[0].position)} exactly, {len(replayed[0].position)} replayed")

# %% [markdown]
# ## The error by layer and by distance
#
# Relative difference of the residual streams of each replayed row from the exact ones, without any
# rounding (float32).


# %%
def error(a, b):
    a, b = (np.asarray(x.streams, np.float64).reshape(len(x.position), -1) for x in (a, b))
    a = a[-len(b) :]
    return np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)


# %%
decoder_errors = np.array([error(a, b) for a, b in zip(exact, replayed, strict=True)])
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
last, first = cfg.num_hidden_layers - 0.5, cfg.last_kv_source + 0.5
extent = (window, 0, last, first)
scale = {"cmap": "magma_r", "norm": "log", "vmin": 1e-4, "vmax": 1, "aspect": "auto"}
image = axes.imshow(decoder_errors, extent=extent, **scale)
axes.set(xlabel="rows before the end of the prompt", ylabel="layer")
figure.colorbar(image, label="relative error")
plt.show()

# %% [markdown]
# Row by row the missing part of the window shrinks, and the last row misses nothing in the first of
# these layers. In later ones it reads window rows that were off themselves. What that does to the
# next token:

# %%
exact_p, p = (np.asarray(jax.nn.softmax(x[-window:])) for x in (exact_logits, logits))
divergence = np.sum(exact_p * (np.log(exact_p) - np.log(p)), axis=-1)
figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
axes.semilogy(np.arange(window, 0, -1), divergence, ".-")
axes.set(xlabel="rows before the end of the prompt", ylabel="KL in nats", xlim=(window, 0))
plt.show()
same = exact_p.argmax(axis=-1) == p.argmax(axis=-1)
print(f"last row: KL {divergence[-1]:.1e} nats, the likeliest token the same: {same[-1]}")
print(f"all {window} rows: the same likeliest token in {same.mean():.0%}")

# %% [markdown]
# Only the last row's token is used; the others leave window rows that the first decoded tokens
# read. `python -m serving.quality` measures what is left of it over a held-out text.
#
# ## After a prefix hit
#
# The other side: window rows are private and not kept with a prefix, so the last window of a hit is
# run through the encoder half again, seeing nothing below itself. Global entries stay as first
# written.

# %%
start = len(ids) - 3 * window
again = tracer.encoder(start)
encoder_errors = np.array([error(a, b) for a, b in zip(encoder, again, strict=True)])
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
span = (start, len(ids), len(again) - 0.5, -0.5)
image = axes.imshow(encoder_errors, extent=span, **scale)
axes.axvline(start + window, color="black", lw=1)
axes.set(xlabel="position (new tokens right of the line)", ylabel="layer")
figure.colorbar(image, label="relative error")
plt.show()
print("mean error of new rows by layer:", encoder_errors[:, window:].mean(axis=1).round(4))

# %% [markdown]
# Each layer's window carries the error one window further, and thinner. What the new rows write to
# the global cache is off by that little.
#
# ## The time it saves
#
# On this machine, with the small model: the programs above once more, now that they are compiled.


# %%
def seconds(run):
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


tracer.encoder()
first = min(seconds(tracer.encoder) for _ in range(3))
behind = {n: min(seconds(lambda n=n: tracer.decoder(n)) for _ in range(3)) for n in (None, window)}
saved = 1 - (first + behind[window]) / (first + behind[None])
print(f"first half {first:.3f} s; the rest {behind[None]:.3f} s, replayed {behind[window]:.3f} s")
print(f"{saved:.0%} less in all")

# %% [markdown]
# For the released model on eight H200s, as the roofline of `python -m sharding.sweep` estimates it
# (not measured):

# %%
model, machine = ShardedModel(Config.preset("flash"), layout("tp8")), hardware("h200")
contexts = [1024 * 2**n for n in range(8)]
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for replay in (False, True):
    steps = [Step("prefill", 1, context, bounded_replay=replay) for context in contexts]
    times = [model.estimate(machine, step).step_us / 1e6 for step in steps]
    axes.loglog(contexts, times, "o-", label="bounded replay" if replay else "every row")
    print("with   " if replay else "without", [f"{t:.2f}" for t in times], "s")
axes.set(xlabel="prompt tokens", ylabel="seconds to the first token")
axes.legend()
plt.show()
