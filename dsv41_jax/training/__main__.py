"""Train a small model and write it as a released checkpoint.

``python -m dsv41_jax.training --preset mini --data data.npz --sources sources.json --out DIR
--minutes 9``; with ``--resume`` it goes on from the newest checkpoint in DIR. Steps that are not
given follow from the speed of the first ones and ``--budget``.
"""

import argparse
import sys
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import tokenizers

from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.config import PRESETS, Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer, token_map
from dsv41_jax.training.card import write_card
from dsv41_jax.training.data import Corpus
from dsv41_jax.training.export import export
from dsv41_jax.training.ngram import held_out_nats
from dsv41_jax.training.optimiser import Recipe
from dsv41_jax.training.run import Options, Run


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _train(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.training", description=__doc__)
    parser.add_argument("--preset", required=True, help="a preset's name, or a config.json")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE.npz")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="default: the preset's")
    parser.add_argument("--sources", type=Path, metavar="FILE.json", help="for the model card")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, help="of the whole run; default: what fits --budget")
    parser.add_argument("--minutes", type=float, help="stop and save after so long")
    parser.add_argument("--budget", type=float, help="minutes of the whole run; default: --minutes")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--rows", type=int, default=Options.rows, help="tokens of a sequence")
    parser.add_argument("--count", type=int, default=Options.count, help="sequences of a step")
    parser.add_argument("--every", type=int, default=Options.every, help="steps between states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=Recipe.peak, help="peak learning rate")
    return parser


def _train(arguments: argparse.Namespace) -> None:
    cfg = _config(arguments.preset)
    tokenizer_file = arguments.tokenizer or _own_tokenizer(arguments.preset)
    options = Options(
        rows=arguments.rows,
        count=arguments.count,
        steps=arguments.steps,
        minutes=arguments.minutes,
        budget=arguments.budget,
        seed=arguments.seed,
        every=arguments.every,
        recipe=Recipe(peak=arguments.peak),
    )
    corpus = Corpus.load(arguments.data, cfg.vocab_size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(cfg, _token_map(tokenizer_file, cfg), corpus, arguments.out, options)
    if arguments.resume:
        run.resume()
    elif not run.checkpoints.empty:
        raise UserError(f"{arguments.out}: holds a run; --resume goes on with it")
    if not run.train():
        progress_line(f"stopped at step {int(run.state.step)}; --resume goes on")
        return
    held_out = run.evaluate()
    held_out["ngram_perplexity"] = float(np.exp(held_out_nats(corpus, cfg.vocab_size).mean()))
    run.record |= {"held_out": held_out, "device": jax.devices()[0].device_kind}
    run.finish()
    released = arguments.out / "released"
    export(run.state.values, cfg, released, tokenizer_file)
    (released / "record.json").write_text((arguments.out / "record.json").read_text("utf-8"))
    if arguments.sources:
        write_card(Path(arguments.preset).stem, cfg, released, arguments.sources)
    progress_line(f"wrote {released}")


def _config(preset: str) -> Config:
    return Config.preset(preset) if preset in PRESETS else Config.from_json(preset)


def _own_tokenizer(preset: str) -> Path:
    path = resources.files("dsv41_jax").joinpath(f"presets/{preset}.tokenizer.json")
    if not isinstance(path, Path) or not path.is_file():
        raise UserError(f"--preset {preset}: has no tokenizer of its own; give --tokenizer")
    return path


def _token_map(file: Path, cfg: Config) -> np.ndarray:
    backend = tokenizers.Tokenizer.from_file(str(file))
    return token_map(Tokenizer(backend, bos_token_id=cfg.bos_token_id), cfg)[0]


if __name__ == "__main__":
    sys.exit(main())
