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
# # The architecture
#
# Who reads whose KV in DeepSeek-V4.1-Flash, where its parameters are, and where the 890 bytes of
# cache a token are. All of it follows from the released `config.json`; nothing is loaded.

# %%
import matplotlib.pyplot as plt

from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.report import report_preset
from dsv41_jax.config import Config
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.training.export import bytes_by_kind
from pallas_kernels.numerics import SERVING
from sharding.estimate import slot_bytes

cfg = Config.preset("flash")
plan = layer_plan(cfg)

# %% [markdown]
# ## Who reads whose
#
# Every layer keeps a window of its own last 128 tokens. Beyond that it attends to at most 512
# entries of a *global* cache, and four layers write such a cache for all others. An index selects
# the entries, and a layer may reuse the selection of one before it. Blocks of one colour read from
# the layer whose number they carry.

# %%
source = {
    "Engram": [layer.index if layer.engram else None for layer in plan],
    "candidates": [cfg.candidate_source_layer_id if x.index >= 20 else None for x in plan],
    "selection": [layer.index_source for layer in plan],
    "global KV": [layer.kv_source for layer in plan],
}

# %%
figure, axes = plt.subplots(figsize=(10, 2.4), layout="constrained")
for y, owners in enumerate(source.values()):
    for layer, owner in enumerate(owners):
        if owner is not None:
            axes.barh(y, 1, left=layer - 0.5, height=0.8, color=plt.cm.tab20(owner // 2))
        if owner == layer:
            axes.text(layer, y, owner, ha="center", va="center", fontsize=8)
axes.axvline(cfg.last_kv_source + 0.5, color="black", lw=1)
axes.set(yticks=range(4), yticklabels=source, xlim=(-0.5, len(plan) - 0.5))
axes.set_xlabel("layer (encoder half | decoder half)")
plt.show()

# %%
kinds = [layer.kind for layer in plan]
for kind in dict.fromkeys(kinds):
    print(f"{kind:8} {kinds.count(kind):2} layers, first {kinds.index(kind)}")
print("layers behind the line read only what layers up to", cfg.last_kv_source, "have cached")

# %% [markdown]
# Left of the line a layer's rows depend on all earlier tokens through caches that the same half
# writes. Right of it no layer writes a global cache: a prompt row that nobody asks for logits of,
# and that no window reaches, never needs to run there. That is what bounded replay uses.
#
# ## Where the parameters are

# %%
report, kinds = report_preset("flash"), bytes_by_kind(cfg)
kinds = {kind: kinds[kind] for kind in sorted(kinds, key=lambda kind: kinds[kind])}
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
bars = axes.barh(list(kinds), [count for count, _ in kinds.values()], log=True)
axes.bar_label(bars, [f" {n / 1e9:.3g}B, {size / 1e9:.3g} GB" for n, size in kinds.values()])
axes.set(xlabel="parameters", xlim=(1e5, 1e14))
plt.show()
apart = kinds["Engram tables"][0] + kinds["draft stages"][0]
print(f"all {report['parameters']:,}, in {report['nbytes'] / 1e9:.1f} GB")
print(f"without Engram tables and draft stages {report['parameters'] - apart:,}: the 552B")

# %% [markdown]
# Few of them work on a token. A decoded token passes all layers with 6 of 384 experts each; a
# prompt token passes the encoder half only.

# %%
specs = inventory(cfg)


def active(layers, *, head):
    names = [f"layers.{i}." for i in layers] + ["head."] * head
    mine = {name: spec for name, spec in specs.items() if name.startswith(tuple(names))}
    routed = sum(s.parameters for name, s in mine.items() if ".experts." in name)
    tables = sum(s.parameters for name, s in mine.items() if ".engram.embed." in name)
    rest = sum(s.parameters for s in mine.values()) - routed - tables
    return rest + routed * cfg.num_experts_per_tok // cfg.n_routed_experts


print(f"prompt token  {active(range(20), head=False) / 1e9:.1f}B of the parameters")
print(f"decoded token {active(range(40), head=True) / 1e9:.1f}B")

# %% [markdown]
# ## Where the 890 bytes are
#
# Taken from the arrays of a real, empty cache of one 64-token page: an entry is a latent of 512
# numbers in FP4 with a scale for each 16, and an index key of 128 in FP4 with a scale for each 32.
# Three owners write an entry for two tokens, one an entry a token.

# %%
shape = CacheShape(slots=1, pages=1)
cache = new_cache(cfg, SERVING, shape)
figure, axes = plt.subplots(figsize=(7, 1.8), layout="constrained")
left = 0
for owner, pool in cache.pools.items():
    for part, rows in (("latent", pool.latents), ("key", pool.keys)):
        size = rows.nbytes / shape.page_size
        color = plt.cm.tab20(owner // 2)
        axes.barh(0, size, left=left, color=color, alpha=0.5 if part == "key" else 1)
        axes.text(left + size / 2, 0, f"{size:g}", ha="center", va="center", fontsize=8)
        left += size
axes.set(yticks=[], xlabel="bytes a token: latents and (pale) keys of layers 2, 8, 14, 20")
plt.show()
print(f"{left:g} bytes a token, so 2^20 tokens take {left:g} MiB")

# %% [markdown]
# The same in two other currencies: what one bf16 latent in every layer would take, and what every
# request keeps besides (windows of the layers and draft stages, hand-over between the halves).

# %%
latents = cfg.num_hidden_layers * cfg.head_dim * 2
print(f"a bf16 latent in each of {cfg.num_hidden_layers} layers: {latents:,} bytes a token,")
print(f"{latents / left:.0f} times as much")
for kind, size in slot_bytes(cfg).items():
    print(f"{kind:8} {size / 1e6:6.2f} MB a request, however long it is")
