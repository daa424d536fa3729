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
# # DSpark: drafts from the model's own last layers
#
# Three small draft stages read what enters the last three layers and propose five tokens at once;
# the model then verifies them in one pass. Tokens stay those of plain decoding, only the number of
# passes changes.

# %%
import time

import jax.numpy as jnp
import matplotlib.pyplot as plt

from pallas_kernels.numerics import FLOAT32
from serving.acceptance import likeliest
from serving.engine import Engine
from serving.generate import load
from serving.options import EngineOptions
from serving.request import Request
from serving.speculative import Speculation

# %%
loaded = load("../checkpoints/mini", FLOAT32, speculation=True)
cfg = loaded.model.cfg
print(f"{cfg.num_nextn_predict_layers} stages propose {cfg.dspark_block_size} tokens a block")

# %%
options = EngineOptions(
    slots=4, pages=64, page_size=32, max_tokens=192, prefill=((1, 128),), decode=(4,),
    prefix_cache=False, logprobs=0, prompt_logprobs=False, speculation=Speculation(),
)  # fmt: skip
engine = Engine(loaded.model, loaded.ops, options, loaded.tokenizer)
engine.warm_up()
with open("text.txt", encoding="utf-8") as file:
    paragraphs = [text for text in file.read().split("\n\n") if len(text) > 300]
prompts = [tuple(loaded.tokenizer.encode(text)[:100]) for text in paragraphs][:8]
print(len(prompts), "prompts of", sorted({len(prompt) for prompt in prompts}), "tokens")

# %% [markdown]
# ## The same tokens
#
# A request may opt out of drafts, so one engine runs both. In float32 the answers must be equal,
# as long as nothing else differs: a prefix hit of the second run would bring its own approximation
# (`04_bounded_replay`), so this engine keeps no prefixes.


# %%
def answers(speculative):
    began = time.perf_counter()
    requests = [Request(prompt, 64, speculative=speculative) for prompt in prompts]
    done = engine.run(requests)
    return [s.result for s in done], time.perf_counter() - began


drafted, with_drafts = answers(True)
acceptance = engine.acceptance
plain, without = answers(False)
equal = [a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True)]
print("answers equal:", equal)

# %% [markdown]
# ## How many drafts hold
#
# A draft counts only if all before it in its block were right, so the curve can but fall.

# %%
shares = [a / max(n, 1) for a, n in zip(acceptance.by_position, acceptance.tried, strict=True)]
figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
bars = axes.bar(range(1, len(shares) + 1), shares)
axes.bar_label(bars, [f"{share:.0%}" for share in shares])
axes.set(xlabel="place in the block", ylabel="accepted", ylim=(0, 1.1))
plt.show()
print(f"{acceptance.tokens_per_step:.2f} tokens a pass instead of 1,")
print(f"{acceptance.accepted} of {acceptance.drafted} drafts accepted in {acceptance.steps} passes")

# %% [markdown]
# By answer: what is easy to foresee is drafted well.

# %%
order = sorted(range(len(drafted)), key=lambda i: -drafted[i].accepted / max(drafted[i].drafted, 1))
for i in (order[0], order[-1]):
    result = drafted[i]
    print(f"{result.accepted} of {result.drafted} accepted:")
    print(loaded.tokenizer.decode(result.token_ids), "\n")

# %% [markdown]
# ## What it costs and saves
#
# A pass over six rows reads the same weights as a pass over one. A GPU with few requests waits for
# those weights, so tokens a pass is the gain; a CPU computes every row, and gains less or loses:

# %%
tokens = sum(len(result.token_ids) for result in plain)
print(f"this CPU: {tokens / with_drafts:.0f} tokens/s with drafts, {tokens / without:.0f} without")

# %% [markdown]
# With many requests verifying all drafts is a waste. The draft also says how sure it is, and a
# budget (`--draft-budget`) goes to the drafts likeliest to count: of three requests with these
# confidences, eight drafts in all.

# %%
confidence = jnp.array([[3.0, 3, 3, 3, 3], [0, 0, 0, 0, 0], [2, 1, -2, 3, 3]])
budget = likeliest(confidence, jnp.full(3, 5), 8)
print("drafts verified:", budget.tolist())
