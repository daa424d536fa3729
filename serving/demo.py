"""The project's first minute: ``make demo`` runs three prompts with bounded replay on and off."""

import argparse
import sys
import time

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.prompt import prompt_ids
from pallas_kernels.numerics import REFERENCE
from serving.generate import Loaded, load
from serving.programs import Programs
from serving.request import Request, Result
from serving.runner import Runner, RunnerOptions

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
    programs = None
    for replay in (True, False):
        programs = _run(loaded, prompts, replay, programs)


def _run(
    loaded: Loaded, prompts: list[tuple[int, ...]], replay: bool, programs: Programs | None
) -> Programs:
    options = RunnerOptions(
        requests=len(prompts),
        max_tokens=max(map(len, prompts)) + NEW_TOKENS,
        page_size=16,
        replay=replay,
    )
    print(f"\nbounded replay {'on' if replay else 'off'}")
    began = time.perf_counter()
    runner = Runner(loaded.model, loaded.ops, options, programs)
    runner.warm_up([len(prompt) for prompt in prompts], progress=lambda s: progress_line(f"  {s}"))
    print(f"  ready in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    results = runner.generate([Request(prompt, NEW_TOKENS) for prompt in prompts])
    elapsed = time.perf_counter() - began
    for text, prompt, result in zip(PROMPTS, prompts, results, strict=True):
        _show(loaded, text, prompt, result)
    tokens = sum(len(result.token_ids) for result in results)
    print(f"  {tokens} tokens in {elapsed:.2f} s, {tokens / elapsed:.0f} tokens/s;", end=" ")
    print(f"compiles after warm-up: {runner.compiles.count}")
    print(f"  global cache: {runner.kv_bytes_per_token:g} bytes a token (890 in the release)")
    return runner.programs


def _show(loaded: Loaded, text: str, prompt: tuple[int, ...], result: Result) -> None:
    print(f"  {text!r}: {len(prompt)} prompt tokens,", end=" ")
    print(f"rows {result.encoder_rows} / {result.decoder_rows} up to / after the last KV source")
    print(f"    tokens {result.token_ids}")
    print(f"    text   {loaded.tokenizer.decode(result.token_ids, skip_special=True)!r}")
    print(f"    first token {result.ttft_ms:.0f} ms, then {result.tpot_ms:.1f} ms a token")


if __name__ == "__main__":
    sys.exit(main())
