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
# # One kernel from reference to Hopper
#
# `mhc_expand_collapse_norm` follows every attention and every expert layer: it writes a sublayer's
# output into the four residual streams, mixes them, and makes the normed input of the next
# sublayer. This is its way from three lines of JAX to a fused kernel, with measured times.

# %%
import inspect
import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels.bench import BASELINES, BF16_TFLOPS, HBM_GBPS
from pallas_kernels.mhc import fused_ptx, ref
from pallas_kernels.mhc.cases import Case

# %% [markdown]
# ## The reference
#
# It is the specification and what runs on a CPU. Each of its steps is rounded to the dtype of the
# streams.

# %%
for function in (ref.expand, ref.collapse, ref.expand_collapse_norm):
    print(inspect.getsource(function))

# %%
rows, streams, width = 128, 4, 5120
keys = jax.random.split(jax.random.key(0), 3)
h = jax.random.normal(keys[0], (rows, streams, width), jnp.bfloat16)
y = jax.random.normal(keys[1], (rows, width), jnp.bfloat16)
comb = ref.sinkhorn(jax.random.normal(keys[2], (rows, streams, streams)), iters=20, eps=1e-6)
ones, weight = jnp.ones((rows, streams)), jnp.ones(width, jnp.bfloat16)
run = jax.jit(lambda *a: ref.expand_collapse_norm(*a, norm_eps=1e-20))
h_new, x = run(h, y, ones, comb, ones / streams, weight)
print(h_new.shape, x.shape, x.dtype)

# %% [markdown]
# ## The bound
#
# Hardly any arithmetic: the time is that of moving bytes. At least the streams are read and
# written, the sublayer's rows are read and the normed ones written, in bf16. XLA keeps the norm,
# which needs a whole row, apart from what comes before it, and reads the streams more than once.
# What its program for this CPU says of itself:

# %%
least = Case(rows, part="fused").nbytes
program = run.lower(h, y, ones, comb, ones / streams, weight).compile()
touched = program.cost_analysis()["bytes accessed"]
print(f"least {least / 1e6:.1f} MB, XLA's program {touched / 1e6:.1f} MB: {touched / least:.1f}x")
large = Case(8192, part="fused").nbytes
print(f"8192 rows: {large / 1e6:.0f} MB, {large / HBM_GBPS / 1e3:.0f} us at {HBM_GBPS:.0f} GB/s")

# %% [markdown]
# ## The kernel
#
# One pass. A block of threads takes every `grid`-th row; a thread holds eight neighbouring columns
# of all streams in registers, and those of the next row are on their way while this one is worked
# on. One barrier a row, for the norm's sum. The inner loop is PTX written by Python, so that every
# rounding is where the reference has it.

# %%
launch = fused_ptx.Fused(rows=8192, width=width, grid=132, norm_eps=1e-20)
lines = fused_ptx.program(launch)
print(f"{launch.grid} blocks of {launch.threads} threads, {4 * launch.words} bytes of SMEM")
body = lines[lines.index("ROW:") :]
print(len(lines), "lines; the row's loop begins")
print("\n".join(line[:96] for line in body[:14]))

# %% [markdown]
# ## Measured
#
# On an H200, from the baselines in this repository (`python -m pallas_kernels.bench mhc`). The
# newest line of each case counts.

# %%
measured = {}
with open(BASELINES / "nvidia-h200.jsonl", encoding="utf-8") as file:
    for line in file:
        row = json.loads(line)
        measured[row["op"], row["case"], row["impl"]] = row
cases = [Case(n, part="fused") for n in (1, 8, 32, 128, 2048, 8192)]
times = {i: [measured["mhc", str(c), i]["us"] for c in cases] for i in ("xla", "pallas")}
for case, xla, ours in zip(cases, times["xla"], times["pallas"], strict=True):
    bound = case.nbytes / HBM_GBPS / 1e3
    print(f"{case.rows:5} rows: XLA {xla:7.1f} us, kernel {ours:6.1f} us,", end=" ")
    print(f"{xla / ours:.1f}x; bound {bound:6.1f} us, reached {bound / ours:.0%}")

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
counts = np.array([case.rows for case in cases])
for impl, label in (("xla", "XLA"), ("pallas", "kernel")):
    axes.loglog(counts, times[impl], "o-", label=label)
bound = [case.nbytes / HBM_GBPS / 1e3 for case in cases]
axes.loglog(counts, bound, "k--", label=f"bytes at {HBM_GBPS / 1e3:g} TB/s")
axes.set(xlabel="rows", ylabel="microseconds")
axes.legend()
plt.show()

# %% [markdown]
# With few rows the launch is all there is; with many the kernel is near the bound, and XLA is not.
#
# ## Where the other kernels are
#
# The roofline of the device, and every kernel measured on it: how much it computes for a byte,
# and how fast. Under the slope memory limits, under the roof the tensor cores do.

# %%
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for op in ("moe_experts", "moe_gate", "index_scores", "sparse_attention"):
    ours = [row for (name, _, impl), row in measured.items() if (name, impl) == (op, "pallas")]
    intensity = [1e3 * row["tflops"] / row["gbps"] for row in ours]
    axes.loglog(intensity, [row["tflops"] for row in ours], "o", ms=4, label=op)
x = np.geomspace(1, 1e4, 200)
axes.loglog(x, np.minimum(x * HBM_GBPS / 1e3, BF16_TFLOPS), "k-", label="H200")
axes.set(xlabel="FLOP a byte", ylabel="TFLOP/s", ylim=(0.2, 2000))
axes.legend(fontsize=8)
plt.show()
