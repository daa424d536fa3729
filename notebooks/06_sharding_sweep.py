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
# # Which layout?
#
# A sweep over the ways to spread the released model over eight H200s: what fits, how long a step
# takes, and which layouts are worth a thought. Times are estimates of a roofline; `--measure` of
# `python -m sharding.sweep` runs them instead.

# %%
from io import BytesIO

import matplotlib.pyplot as plt
from IPython.display import Image, display

from dsv41_jax.config import Config
from sharding.estimate import ShardedModel
from sharding.hardware import MEANINGS, hardware
from sharding.layouts import LAYOUTS
from sharding.plot import pareto, plot_front
from sharding.roofline import Step
from sharding.sweep import Sweep

cfg, machine = Config.preset("flash"), hardware("h200")

# %% [markdown]
# What the estimate knows of the machine, and from where:

# %%
print(machine.label)
for name, figure in machine.figures.items():
    if figure:
        print(f"{figure.value:8g} {MEANINGS[name]}: {figure.source}")

# %% [markdown]
# ## What fits
#
# `tpN` cuts heads and expert columns over N devices, `depN` gives every device its own requests and
# spreads whole experts. Engram tables are spread over all devices.

# %%
models = tuple(ShardedModel(cfg, x) for x in LAYOUTS.values() if x.devices == 8)
kinds = ("experts", "dense", "engram_tables", "draft", "pool", "windows", "carry", "reserved")
names = [model.layout.name for model in models]
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
left = [0.0] * len(models)
held = [model.footprint(machine, context=131072, concurrency=128).by_kind for model in models]
for kind in kinds:
    sizes = [by_kind[kind] / 1e9 for by_kind in held]
    axes.barh(names, sizes, left=left, label=kind.replace("_", " "))
    left = [a + b for a, b in zip(left, sizes, strict=True)]
axes.axvline(machine["memory_gb"], color="black", lw=1)
axes.set(xlabel="GB a device: 128 requests of 131,072 tokens (line: memory)")
figure.legend(loc="outside right center", fontsize=8)
plt.show()

# %% [markdown]
# ## The Pareto picture
#
# Every layout with every batch: speed for one user against throughput of a GPU. On the front no
# other point is better in both.

# %%
steps = tuple(Step("decode", batch, 8192) for batch in (1, 8, 32, 128, 512))
rows = Sweep(cfg, machine, models, {}, steps).rows()
picture = BytesIO()
plot_front(rows, machine.label, picture)
display(Image(picture.getvalue(), width=640))

# %%
for row in pareto(rows):
    step_ms = row["step_us_estimated"] / 1e3
    print(f"{row['layout']:8} batch {row['batch']:3}: {step_ms:6.2f} ms,", end=" ")
    print(f"{row['tokens_per_s_user']:5.0f} tokens/s a user, {row['tokens_per_s_gpu']:5.0f} a GPU")

# %% [markdown]
# ## Why
#
# What the steps of two layouts consist of. With one request `dep8` reads all dense weights on the
# only rank that has work, `tp8` an eighth of them on each; launches cost both the same. With many,
# `tp8` attends, mixes streams and adds up over all ranks for every request, `dep8` has each request
# in one place.

# %%
compared = [row for row in rows if row["layout"] in ("tp8", "dep8") and row["batch"] in (1, 512)]
parts = sorted({part for row in compared for part in row["parts_us"]})
figure, axes = plt.subplots(2, 1, figsize=(8, 2.8), layout="constrained")
for panel, batch in zip(axes, (1, 512), strict=True):
    two = [row for row in compared if row["batch"] == batch]
    left = [0.0] * len(two)
    for i, part in enumerate(parts):
        ms = [row["parts_us"].get(part, 0) / 1e3 for row in two]
        bars = {"color": plt.cm.tab20(i), "label": part if batch == 1 else None}
        panel.barh([f"{row['layout']}, batch {batch}" for row in two], ms, left=left, **bars)
        left = [a + b for a, b in zip(left, ms, strict=True)]
axes[1].set_xlabel("estimated milliseconds of a step")
figure.legend(loc="outside right center", fontsize=8)
plt.show()
