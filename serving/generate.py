"""Generate from one prompt: ``python -m serving.generate --checkpoint DIR --prompt TEXT``."""

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.checkpoint.read import read_config
from dsv41_jax.command import exit_status, progress_line
from dsv41_jax.config import Config
from dsv41_jax.engram_shared import DIRECTORY, share_tables
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.moe import repack_experts
from dsv41_jax.ops import Ops
from dsv41_jax.prompt import parse_token_ids, prompt_ids, read_text
from dsv41_jax.score import default_numerics
from dsv41_jax.shared_copy import SharedCopy
from dsv41_jax.tokenizer import Tokenizer
from pallas_kernels.dispatch import KINDS
from pallas_kernels.numerics import MODES, Numerics
from serving.engine import Engine, Event
from serving.options import EngineOptions
from serving.request import Request, Result, TokenLogprobs, check_request
from serving.sequence import Sequence
from serving.speculative import add_options, speculation_of
from sharding.all_reduce import HELP as ALL_REDUCE_HELP
from sharding.all_reduce import KINDS as ALL_REDUCES
from sharding.all_reduce import peer_kernels
from sharding.build import build_ops
from sharding.place import Placement, load_placed, place
from sharding.processes import add_options as add_process_options
from sharding.processes import join
from sharding.repack import repack_placed

MAX_LOGPROBS = 20
ENGRAM = {"hbm": "device", "host": "host", "shared": "host"}
ENGRAM_HELP = (
    "Engram tables: hbm (default), spread over the devices; host: mapped files of the checkpoint;"
    " or shared[:DIR]: one checked copy in shared memory (default: /dev/shm) for all processes of"
    " this machine. From host and shared, rows are fetched before each step, which therefore waits"
    " for the tokens before it"
)
LAYOUT_HELP = "devices: tp8, dep8, tp4xdp2, ... (default: tp1)"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to run. peers: kernels of its sums over tensor ranks, "" for ``psum``.
    tables: the copy of its Engram tables that processes share, if they do.
    """

    model: Model
    tokenizer: Tokenizer
    ops: Ops
    placement: Placement | None = None
    peers: str = ""
    tables: SharedCopy | None = None

    def close(self) -> None:
        """Let go of the shared tables; nothing may run any more."""
        if self.tables is not None:
            self.tables.close()

    @property
    def data_ranks(self) -> int:
        return self.placement.division.layout.data if self.placement else 1


def load(
    checkpoint: str | Path,
    numerics: Numerics,
    *,
    kernels: str = "auto",
    layout: str = "tp1",
    speculation: bool = False,
    all_reduce: str = "auto",
    engram: str = "hbm",
) -> Loaded:
    """Model, tokenizer and operations of a checkpoint directory, on the devices of a layout;
    UserError names whatever is wrong with it, or with the layout before anything is loaded.
    speculation: the draft stages must be there. all_reduce: of ``sharding.all_reduce.KINDS``.
    engram: what ``engram_place`` takes, where the tables are.
    """
    kind, shared_in = engram_place(engram)
    cfg = read_config(checkpoint)
    placement = _placement(layout, cfg)
    peers = peer_kernels(all_reduce, placement, numerics, kernels)
    division, sums = placement.division if placement else layout, "peer" if peers else "psum"
    ops, where = build_ops(division, numerics, kernels, sums), ENGRAM[kind]
    if placement is None:
        model = load_model(checkpoint, numerics=numerics, speculation=speculation, engram=where)
        repack_experts(model, kernels)
    else:
        model = load_placed(
            checkpoint, placement, numerics=numerics, speculation=speculation, engram=where
        )
        repack_placed(model, placement, kernels)
    tables = share_tables(model, shared_in, progress=progress_line) if shared_in else None
    return Loaded(model, Tokenizer.from_dir(checkpoint, cfg), ops, placement, peers, tables)


def engram_place(text: str) -> tuple[str, Path | None]:
    """A key of ``ENGRAM`` and the folder that tables are shared in, from ``shared:DIR`` or the key;
    UserError for anything else.
    """
    kind, colon, folder = text.partition(":")
    if kind not in ENGRAM or (colon and (kind != "shared" or not folder)):
        raise UserError(f"engram {text!r}: must be one of {', '.join(ENGRAM)}, shared:DIR")
    return kind, (Path(folder) if folder else DIRECTORY) if kind == "shared" else None


def _placement(layout: str, cfg: Config) -> Placement | None:
    """None for one device."""
    placement = place(layout, cfg)
    used = placement.division.layout
    if used.devices == 1:
        return None
    notes = [*placement.division.notes]
    if used.data > 1:
        notes.append(f"{used.data} data ranks, each with slots and pages of its own")
    if used.tensor > 1:
        notes.append("every tensor rank holds a copy of its data rank's cache")
    for note in notes:
        progress_line(f"layout {layout}: {note}")
    return placement


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: (join(arguments), _generate(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.generate", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="encoded behind a BOS")
    source.add_argument("--token-ids", metavar="1,2,3")
    source.add_argument("--prompt-file", metavar="F", help="UTF-8 text, encoded behind a BOS")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default: 64, or what the positions leave"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="0 keeps every id (default)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end of sequence")
    parser.add_argument("--swa-bounded-replay", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--numerics", choices=tuple(MODES), help="default: reference on a CPU, serving on a GPU"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        default=0,
        metavar="K",
        help=f"alternatives a token, at most {MAX_LOGPROBS}",
    )
    parser.add_argument("--kernels", choices=KINDS, default="auto")
    parser.add_argument(
        "--page-size", type=int, default=64, metavar="N", help="tokens a page, even"
    )
    parser.add_argument(
        "--chunk-size", type=int, default=512, metavar="N", help="most prompt rows a dispatch"
    )
    parser.add_argument("--layout", default="tp1", metavar="NAME", help=LAYOUT_HELP)
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto", help=ALL_REDUCE_HELP)
    parser.add_argument("--engram", default="hbm", metavar="WHERE", help=ENGRAM_HELP)
    add_process_options(parser)
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    _check(arguments)
    text = arguments.prompt if arguments.prompt_file is None else read_text(arguments.prompt_file)
    given = parse_token_ids(arguments.token_ids) if arguments.token_ids is not None else None
    numerics = default_numerics(arguments.numerics)
    speculation = speculation_of(arguments)
    loaded = load(
        arguments.checkpoint,
        numerics,
        kernels=arguments.kernels,
        layout=arguments.layout,
        speculation=speculation is not None,
        all_reduce=arguments.all_reduce,
        engram=arguments.engram,
    )
    prompt = prompt_ids(loaded.tokenizer, text) if given is None else given
    request = _request(arguments, loaded, prompt)
    check_request(request, loaded.model.cfg)
    options = replace(_options(arguments, request), speculation=speculation)
    engine = Engine(
        loaded.model,
        loaded.ops,
        options,
        loaded.tokenizer,
        placement=loaded.placement,
        peers=loaded.peers,
    )
    first = arguments.process_id == 0  # of several that do the same
    with closing(loaded), closing(engine):
        engine.warm_up(progress=progress_line)
        on_token = _show if first and not arguments.json else None
        sequence = engine.run([request], on_token=on_token)[0]
    if not first:
        return
    if arguments.json:
        print(json.dumps(_report(sequence, engine, arguments.logprobs)))
        return
    print()
    progress_line(f"{sequence.result.finish_reason}: {stats(sequence.result, engine)}")


def _show(_index: int, event: Event) -> None:
    print(event.text, end="", flush=True)


def _options(arguments: argparse.Namespace, request: Request) -> EngineOptions:
    """An engine for one request: one slot, and the prefill shapes that its prompt needs."""
    n, chunk, size = len(request.prompt), arguments.chunk_size, arguments.page_size
    total = n + request.max_new_tokens
    rest = n % chunk if n > chunk else n
    return EngineOptions(
        slots=1,
        pages=-(-total // size),
        page_size=size,
        max_tokens=total,
        prefill=prefill_shapes([min(n, chunk), rest or chunk], chunk),
        decode=(1,),
        replay=arguments.swa_bounded_replay,
        prefix_cache=False,
        logprobs=arguments.logprobs,
        prompt_logprobs=False,
        max_stop_ids=1,
        max_bias_ids=1,
    )


def prefill_shapes(rows: Iterable[int], chunk: int, requests: int = 1) -> tuple:
    """(requests, rows) of prefill dispatches for chunks of so many rows: powers of two up to
    ``chunk``.
    """
    sizes = {min(1 << (count - 1).bit_length(), chunk) for count in rows}
    return tuple((requests, size) for size in sorted(sizes))


def _check(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.logprobs <= MAX_LOGPROBS:
        raise UserError(f"--logprobs {arguments.logprobs} must be between 0 and {MAX_LOGPROBS}")
    if arguments.page_size < 2 or arguments.page_size % 2:
        raise UserError(f"--page-size {arguments.page_size} must be even and at least 2")
    if arguments.chunk_size < 1:
        raise UserError(f"--chunk-size {arguments.chunk_size} must be at least 1")


def _request(arguments: argparse.Namespace, loaded: Loaded, prompt: list[int]) -> Request:
    cfg = loaded.model.cfg
    new = arguments.max_new_tokens
    if new is None:
        new = max(1, min(64, cfg.max_position_embeddings - len(prompt)))
    return Request(
        prompt=tuple(prompt),
        max_new_tokens=new,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop_ids=() if arguments.ignore_eos else (cfg.eos_token_id,),
        logprobs=arguments.logprobs,
    )


def _report(sequence: Sequence, engine: Engine, logprobs: int) -> dict[str, Any]:
    result, output = sequence.result, sequence.output
    report: dict[str, Any] = {
        "prompt_token_ids": list(sequence.request.prompt),
        "token_ids": result.token_ids,
        "text": "" if output is None else output.text,
        "finish_reason": result.finish_reason,
    }
    if logprobs:
        report["logprobs"] = [_logprobs(token) for token in result.logprobs]
    report["stats"] = stats(result, engine)
    return report


def _logprobs(token: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top]
    return {"token_id": token.token_id, "logprob": token.logprob, "top": top}


def stats(result: Result, engine: Engine) -> dict[str, float | int]:
    """The figures every report shows, and those of the drafts if there may be any."""
    shown: dict[str, float | int] = {
        "ttft_ms": round(result.ttft_ms, 3),
        "tpot_ms": round(result.tpot_ms, 3),
        "cached_tokens": result.cached_tokens,
        "encoder_rows": result.encoder_rows,
        "decoder_rows": result.decoder_rows,
        "compiles_after_warmup": engine.compiles.count,
        "kv_bytes_per_token": engine.executor.kv_bytes_per_token,
    }
    if engine.options.speculation is not None:
        shown |= {"draft_tokens": result.drafted, "accepted_tokens": result.accepted}
        shown["tokens_per_step"] = round(engine.acceptance.tokens_per_step, 3)
        shown |= engine.options.speculation.marks
    return shown


if __name__ == "__main__":
    sys.exit(main())
