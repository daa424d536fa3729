"""The project's first minute: ``make demo`` runs three prompts with bounded replay on and off."""

import argparse
import sys
import time

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.prompt import prompt_ids
from pallas_kernels.numerics import REFERENCE
from serving.engine import Engine
from serving.generate import Loaded, load, prefill_shapes
from serving.options import EngineOptions
from serving.request import Request, Result

PROMPTS = (
    "JAX serves it.",
    "A window of sixteen tokens, then eight selected rows.",
    "Bounded replay runs the layers after the last KV source on the last window only, once.",
)
NEW_TOKENS = 24


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _demo(arguments.checkpoint))


def _demo(checkpoint: str) -> None:
    began = time.perf_counter()
    loaded = load(checkpoint, REFERENCE)
    cfg = loaded.model.cfg
    print(f"loaded {checkpoint} in {time.perf_counter() - began:.1f} s:")
    print(f"  {cfg.num_hidden_layers} layers, hidden size {cfg.hidden_size}, numerics reference")
    print(
        "  This checkpoint is random and tiny: it has the V4.1 architecture and speaks no language."
    )
    print("  `make golden` compares its logits and tokens with those of DeepSeek's own reference.")
    prompts = [tuple(prompt_ids(loaded.tokenizer, text)) for text in PROMPTS]
    executables: dict = {}
    for replay in (True, False):
        _run(loaded, prompts, replay, executables)


def _run(loaded: Loaded, prompts: list[tuple[int, ...]], replay: bool, executables: dict) -> None:
    longest = max(map(len, prompts))
    options = EngineOptions(
        slots=len(prompts),
        pages=64,
        page_size=16,
        max_tokens=longest + NEW_TOKENS,
        prefill=prefill_shapes([longest], 128, len(prompts)),
        decode=(len(prompts),),
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
    for text, prompt, result in zip(PROMPTS, prompts, results, strict=True):
        _show(loaded, text, prompt, result)
    tokens = sum(len(result.token_ids) for result in results)
    print(f"  {tokens} tokens in {elapsed:.2f} s, {tokens / elapsed:.0f} tokens/s;", end=" ")
    print(f"compiles after warm-up: {engine.compiles.count}")
    print(
        f"  global cache: {engine.executor.kv_bytes_per_token:g} bytes a token (890 in the release)"
    )


def _show(loaded: Loaded, text: str, prompt: tuple[int, ...], result: Result) -> None:
    print(f"  {text!r}: {len(prompt)} prompt tokens,", end=" ")
    print(f"rows {result.encoder_rows} / {result.decoder_rows} up to / after the last KV source")
    print(f"    tokens {result.token_ids}")
    print(f"    text   {loaded.tokenizer.decode(result.token_ids, skip_special=True)!r}")
    print(f"    first token {result.ttft_ms:.0f} ms, then {result.tpot_ms:.1f} ms a token")


if __name__ == "__main__":
    sys.exit(main())
