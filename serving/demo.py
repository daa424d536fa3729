"""The project's first minute: ``make demo`` goes on with three texts that the model has never seen,
with bounded replay on and off side by side.
"""

import argparse
import sys
import textwrap
import time

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.prompt import read_text
from pallas_kernels.numerics import REFERENCE
from serving.engine import Engine
from serving.generate import Loaded, load, prefill_shapes
from serving.options import EngineOptions
from serving.quality.text import documents, text_file
from serving.request import Request, Result

PROMPTS = (200, 400, 600)  # tokens of the first documents
NEW_TOKENS = 48
SHOWN = 160  # characters of a prompt's end


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=__doc__)
    parser.add_argument("--checkpoint", default="checkpoints/mini", metavar="DIR")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _demo(arguments.checkpoint))


def _demo(checkpoint: str) -> None:
    began = time.perf_counter()
    loaded = load(checkpoint, REFERENCE)
    cfg = loaded.model.cfg
    print(f"loaded {checkpoint} in {time.perf_counter() - began:.1f} s: a small model of the V4.1")
    print(f"architecture, {cfg.num_hidden_layers} layers of width {cfg.hidden_size}, numerics")
    print("reference. It knows the documentation of Python packages; what it says is made up.")
    texts = documents(read_text(text_file(checkpoint, None)))
    prompts = [
        tuple(loaded.tokenizer.encode(text)[:count])
        for text, count in zip(texts, PROMPTS, strict=False)
    ]
    executables: dict = {}
    results = {replay: _run(loaded, prompts, replay, executables) for replay in (True, False)}
    for i, prompt in enumerate(prompts):
        _show(loaded, prompt, results[True][i], results[False][i])


def _run(
    loaded: Loaded, prompts: list[tuple[int, ...]], replay: bool, executables: dict
) -> list[Result]:
    longest = max(map(len, prompts))
    options = EngineOptions(
        slots=1,
        pages=64,
        page_size=32,
        max_tokens=longest + NEW_TOKENS,
        prefill=prefill_shapes([longest], 256),
        decode=(1,),
        replay=replay,
        prompt_logprobs=False,
    )
    print(f"\nbounded replay {'on' if replay else 'off'}")
    began = time.perf_counter()
    engine = Engine(loaded.model, loaded.ops, options, loaded.tokenizer, executables)
    engine.warm_up(progress=lambda line: progress_line(f"  {line}"))
    print(f"  ready in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    sequences = engine.run(Request(prompt, NEW_TOKENS) for prompt in prompts)
    elapsed = time.perf_counter() - began
    results = [sequence.result for sequence in sequences]
    tokens = sum(len(result.token_ids) for result in results)
    print(f"  {tokens} tokens in {elapsed:.2f} s; compiles after warm-up: {engine.compiles.count};")
    cached = engine.executor.kv_bytes_per_token
    print(f"  global cache: {cached:g} bytes a token (890 in the release)")
    return results


def _show(loaded: Loaded, prompt: tuple[int, ...], on: Result, off: Result) -> None:
    def text(ids: tuple[int, ...] | list[int]) -> str:
        return loaded.tokenizer.decode(list(ids), skip_special=True)

    same = sum(a == b for a, b in zip(on.token_ids, off.token_ids, strict=False))
    whole = text(prompt)
    title = whole.strip().partition("\n")[0]
    print(f"\n{title}: a prompt of {len(prompt)} tokens, whose end is")
    print(_quoted(whole[-SHOWN:]))
    for name, result in (("on", on), ("off", off)):
        rows = f"{result.encoder_rows} / {result.decoder_rows}"
        print(f"replay {name}: rows {rows} up to / after the last KV source;", end=" ")
        print(f"first token {result.ttft_ms:.0f} ms, then {result.tpot_ms:.1f} ms a token")
        print(_quoted(text(result.token_ids)))
    print(f"{same} of {len(on.token_ids)} tokens are the same")


def _quoted(text: str) -> str:
    return textwrap.indent(text.strip("\n"), "  | ", lambda _: True)


if __name__ == "__main__":
    sys.exit(main())
