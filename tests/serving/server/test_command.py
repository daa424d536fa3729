"""The command line."""

import argparse
import socket
import subprocess
import sys

import openai
import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.server.__main__ import _parser, engine_options, main
from serving.server.serve import bound_socket
from tests.serving.listening import named_url


def parsed(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(["--checkpoint", "x", *arguments])


def test_defaults():
    arguments = parsed()
    assert arguments.host == "127.0.0.1" and arguments.api_key is None
    options = engine_options(arguments, Config.preset("flash"))
    assert (options.slots, options.max_tokens, options.pages) == (8, 32768, 4096)
    assert options.prefill == ((1, 64), (1, 512)) and options.decode == (1, 4, 8)
    assert options.replay and options.prefix_cache


def test_engine_options():
    numbers = {"max-running": 6, "chunk": 32, "page-size": 16, "pages": 30}
    flags = ("prefix-cache", "swa-bounded-replay", "prompt-logprobs")
    arguments = parsed(
        *(f"--{name}={value}" for name, value in numbers.items()), *(f"--no-{f}" for f in flags)
    )
    options = engine_options(arguments, Config.preset("tiny"))
    assert (options.slots, options.pages, options.page_size, options.max_tokens) == (6, 30, 16, 128)
    assert options.prefill == ((1, 32),) and options.decode == (1, 4, 6)
    assert not (options.replay or options.prefix_cache or options.prompt_logprobs)
    with pytest.raises(UserError, match="--max-model-len 129 must be at most the model's 128"):
        engine_options(parsed("--max-model-len", "129"), Config.preset("tiny"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-running=0", "--max-running 0 must be at least 1"),
        ("--page-size=3", "--page-size 3 must be even"),
        ("--pages=0", "--pages 0 must be"),
        ("--chunk=0", "--chunk 0 must be"),
        ("--max-queue=-1", "--max-queue -1 must be"),
        ("--max-body-bytes=0", "--max-body-bytes 0 must be"),
        ("--drain-seconds=nan", "--drain-seconds nan must be"),
        ("--port=99999", "--port 99999"),
        ("--host=no.such.host.invalid", "--host no.such.host.invalid"),
    ],
)
def test_bad_options(tiny_dir, capsys, option, message):
    assert main(["--checkpoint", str(tiny_dir), option]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_missing_checkpoint(capsys, tmp_path):
    assert main(["--checkpoint", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_port_in_use(tiny_dir, capsys):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--checkpoint", str(tiny_dir), "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.slow
def test_serves(tiny_dir):
    """The whole command: warm-up, a request, SIGTERM."""
    command = [sys.executable, "-m", "serving.server", "--checkpoint", str(tiny_dir), "--port=0"]
    command += ["--max-running=2", "--chunk=64", "--no-prompt-logprobs", "--model-name=m"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = named_url(process)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            messages = [{"role": "user", "content": "Hi"}]
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=3)
            assert answer.usage.completion_tokens <= 3
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_binds_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with bound_socket("::1", 0) as sock:
        assert sock.family == socket.AF_INET6
