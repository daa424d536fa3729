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
# # Quickstart
#
# Load the small trained checkpoint of this repository, let it continue a prompt, and see what the
# engine did. Everything runs on a CPU; on a Hopper GPU the same calls take the Pallas kernels.

# %%
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels.numerics import REFERENCE
from serving.engine import Engine
from serving.generate import load
from serving.options import EngineOptions
from serving.request import Request

loaded = load("../checkpoints/mini", REFERENCE)
cfg = loaded.model.cfg
print(f"{cfg.num_hidden_layers} layers, width {cfg.hidden_size}, {cfg.n_routed_experts} experts,")
print(f"{cfg.vocab_size} token ids, a window of {cfg.sliding_window} tokens")

# %% [markdown]
# The engine is a fixed set of programs, compiled once: here one prefill shape of 256 rows and one
# decode shape of three requests. After `warm_up` nothing compiles any more.

# %%
options = EngineOptions(
    slots=3, pages=24, page_size=32, max_tokens=256, prefill=((1, 256),), decode=(3,),
    logprobs=4, prompt_logprobs=False,
)  # fmt: skip
engine = Engine(loaded.model, loaded.ops, options, loaded.tokenizer)
engine.warm_up()
print("kinds of programs:", ", ".join(sorted({name for name, _ in options.programs(64)})))

# %% [markdown]
# A prompt, continued three times: the most likely tokens, and two samples. The model is small and
# has read nothing but documentation of software (its card is `checkpoints/mini/README.md`): it has
# the tone, not the facts.

# %%
with open("text.txt", encoding="utf-8") as file:
    text = file.read().split("\n\n")[0]
prompt = tuple(loaded.tokenizer.encode(text))
requests = [Request(prompt, 40, logprobs=4)]
requests += [Request(prompt, 40, temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2)]
sequences = engine.run(requests)
print("prompt ends:", text[-70:], "\n")
for sequence in sequences:
    print(f"T={sequence.request.temperature}: {sequence.output.text.strip()}\n")

# %% [markdown]
# ## How sure was it?
#
# Every token of the first answer with the alternatives that it won against.

# %%
answer = sequences[0].result.logprobs[:20]
grid = np.array([[np.exp(p) for _, p in token.top] for token in answer]).T
figure, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
axes.imshow(grid, cmap="Greens", vmin=0, vmax=1, aspect="auto")
for x, token in enumerate(answer):
    for y, (token_id, logprob) in enumerate(token.top):
        word = loaded.tokenizer.decode([token_id]).replace("\n", "\\n").replace("$", r"\$")
        shade = "white" if np.exp(logprob) > 0.6 else "black"
        axes.text(x, y, word[:9], ha="center", va="center", fontsize=6, color=shade)
axes.set(xticks=range(len(answer)), yticks=range(4), xlabel="token of the answer", ylabel="rank")
plt.show()

# %% [markdown]
# ## What the engine did
#
# The prompt's rows ran through the layers up to the last KV source (the encoder half), but only the
# last window of them through the layers behind it: bounded replay (`04_bounded_replay`). The
# second and third request found the prompt's pages in the prefix cache.

# %%
for sequence in sequences:
    result = sequence.result
    print(f"{len(prompt)} prompt tokens: {result.cached_tokens} from the prefix cache,", end=" ")
    print(f"{result.encoder_rows} rows encoded, {result.decoder_rows} rows decoded;", end=" ")
    print(f"first token {result.ttft_ms:.0f} ms, then {result.tpot_ms:.1f} ms a token")
print(f"{engine.executor.kv_bytes_per_token:g} bytes of global cache a token")
print("compiled after warm-up:", engine.compiles.count)
