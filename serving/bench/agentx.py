"""AgentX on local traces: aiperf's scenario against a server or router, zero errors asked for."""

import argparse
import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from dsv41_jax.errors import UserError
from serving.bench.agent_traces import write_traces
from serving.bench.table import report

SCENARIO = "inferencex-agentx-mvp"
# A Hugging Face cache has its models under a commit's 40 digits.
_REVISION = "0" * 40
_SHOWN = {
    "requests": ("request_count", "avg"),
    "requests_per_s": ("request_throughput", "avg"),
    "tokens_per_s": ("output_token_throughput", "avg"),
    "ttft_ms_p50": ("time_to_first_token", "p50"),
    "ttft_ms_p90": ("time_to_first_token", "p90"),
    "inter_token_ms_p50": ("inter_token_latency", "p50"),
    "cached_tokens": ("total_usage_prompt_cache_read_tokens", "avg"),
    "prompt_tokens": ("total_usage_prompt_tokens", "avg"),
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "agentx", help=f"aiperf --scenario {SCENARIO} on local traces (needs the extra [bench])"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="for its tokenizer")
    parser.add_argument("--model", help="default: the first that /v1/models lists")
    parser.add_argument("--concurrency", type=int, default=2, help="agents at once")
    parser.add_argument("--seconds", type=int, default=60, help="the scenario itself asks for 900")
    parser.add_argument("--sessions", type=int, default=8, help="traces to make up")
    parser.add_argument("--turns", type=int, default=6, help="of an agent; 200 tokens each or less")
    parser.add_argument("--traces", metavar="DIR", help="existing ones in the Weka schema instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aiperf", default="aiperf", metavar="PROGRAM")
    parser.add_argument("--out", default="agentx", metavar="DIR", help="what aiperf writes")
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints a row; UserError if aiperf fails, a request does, or none was sent."""
    program = shutil.which(arguments.aiperf)
    if program is None:
        raise UserError(f"--aiperf {arguments.aiperf}: not found (pip install -e '.[bench]')")
    out = Path(arguments.out).resolve()
    model = arguments.model or _first_model(arguments.url)
    if arguments.traces is None:
        traces = out / "traces"
        counts = {"sessions": arguments.sessions, "turns": arguments.turns}
        write_traces(traces, model=model, **counts, seed=arguments.seed)
    else:
        traces = Path(arguments.traces)
    tokenizer = place_tokenizer(Path(arguments.checkpoint), out / "hf")
    environment = os.environ | {"HF_HOME": str(out / "hf"), "HF_HUB_OFFLINE": "1"}
    command = aiperf_command(program, arguments, model, traces, tokenizer, out)
    export = out / "profile_export_aiperf.json"
    export.unlink(missing_ok=True)
    status = subprocess.run(command, env=environment).returncode
    if status or not export.is_file():
        raise UserError(f"aiperf: ended with status {status}, see {out / 'logs'}")
    row = result(json.loads(export.read_text()))
    report([row], arguments.json)


def aiperf_command(
    program: str,
    arguments: argparse.Namespace,
    model: str,
    traces: Path,
    tokenizer: str,
    out: Path,
) -> list[str]:
    """What is run. The override allows for local traces and a duration below 900 s."""
    return [
        *(program, "profile", "--scenario", SCENARIO, "--unsafe-override"),
        *("--benchmark-duration", str(arguments.seconds)),
        *("--model", model, "--url", arguments.url, "--endpoint-type", "chat", "--streaming"),
        *("--custom-dataset-type", "weka_trace", "--input-file", str(traces)),
        *("--tokenizer", tokenizer, "--use-server-token-count"),
        *("--concurrency", str(arguments.concurrency), "--random-seed", str(arguments.seed)),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(out), "--ui", "simple"),
    ]


def place_tokenizer(checkpoint: Path, cache: Path) -> str:
    """Lay a checkpoint's tokenizer out as a Hugging Face cache has it, and return its name there:
    aiperf's trace loaders take nothing else.
    """
    source = checkpoint / "tokenizer.json"
    if not source.is_file():
        raise UserError(f"--checkpoint {checkpoint}: has no tokenizer.json")
    name = "local/checkpoint"
    home = cache / "hub" / f"models--{name.replace('/', '--')}"
    files = home / "snapshots" / _REVISION
    files.mkdir(parents=True, exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(_REVISION)
    shutil.copy(source, files)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (files / "tokenizer_config.json").write_text(json.dumps(kind))
    return name


def result(exported: dict[str, Any]) -> dict[str, Any]:
    """The row of an aiperf export; UserError unless it is whole and free of errors."""
    shown = {name: exported[key][part] for name, (key, part) in _SHOWN.items() if key in exported}
    row = {name: round(value, 3) for name, value in shown.items()}
    if exported["error_summary"] or exported["was_cancelled"] or not row.get("requests"):
        errors = json.dumps(exported["error_summary"])[:500]
        raise UserError(f"aiperf: {row.get('requests', 0):g} requests, errors: {errors}")
    return row


def _first_model(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"--url {url}: lists no model: {error}") from None
