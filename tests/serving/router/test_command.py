"""The command line."""

import importlib.util

import pytest

from serving.router.__main__ import main, make_policy
from serving.router.policy import OwnPolicy, RoundRobin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--queue"], "--queue: needs --policy own, not auto"),
        (["--retries=-1"], "--retries -1 must be at least 0"),
        (["--check-failures=0"], "--check-failures 0 must be"),
        (["--check-period=nan"], "--check-period nan must be over 0"),
        (["--check-timeout=0"], "--check-timeout 0.0 must be over 0"),
        (["--pool-credit=1.5"], "--pool-credit 1.5 must be between 0 and 1"),
        (["--drain-seconds=nan"], "--drain-seconds nan must be"),
        (["--max-body-bytes=0"], "--max-body-bytes 0 must be"),
        (["--worker=h:1"], "--worker h:1 must be http://HOST:PORT"),
        (["--worker=http://h:1/v1"], "--worker http://h:1/v1 must be http://HOST:PORT"),
        (["--worker=http://a:1/"], "--worker http://a:1 is named twice"),
        (["--port=99999", "--policy=round-robin"], "--port 99999"),
        (["--checkpoint=nowhere", "--policy=round-robin"], "config.json"),
    ],
)
def test_bad_options(capsys, options, message):
    assert main(["--worker=http://a:1", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_worker_is_needed(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--worker" in capsys.readouterr().err


def test_policies():
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    assert isinstance(make_policy("round-robin", 0.5), RoundRobin)
    policy = make_policy("own", 0.5)
    assert isinstance(policy, OwnPolicy) and policy.board.weights.pool_credit == 0.5


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is not None, reason="it is installed")
def test_without_dynamo(capsys):
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    assert main(["--worker=http://a:1", "--policy=dynamo"]) == 2
    assert "--policy dynamo: the extra [route] is not installed" in capsys.readouterr().err
    assert isinstance(make_policy("auto", 0.5), OwnPolicy)
    assert capsys.readouterr().err == "ai-dynamo-runtime is not installed: --policy own\n"
