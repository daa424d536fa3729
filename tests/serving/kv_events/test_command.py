"""The server's command with a pool and events: what a router hears is what engine and pool hold."""

import os
import subprocess
import sys

import httpx
import pytest

from serving.kv_events.hashes import page_hashes
from serving.kv_events.subscriber import Subscriber
from serving.kv_events.wire import DEVICE, POOL
from serving.kv_pool.shm import pool_path
from tests.serving.kv_events.support import WAIT_S, Mirror, wait_for
from tests.serving.listening import named_url

PAGE, PROMPT, NEW = 16, 70, 20


@pytest.mark.slow
def test_a_router_hears_of_the_device_and_the_pool(tiny_dir):
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    pool = f"test-events-{os.getpid()}"
    command = [sys.executable, "-m", "serving.server", "--checkpoint", str(tiny_dir), "--port=0"]
    command += ["--max-running=2", "--chunk=64", f"--page-size={PAGE}", "--no-prompt-logprobs"]
    command += ["--model-name=m", f"--kv-pool=shm:4MB:{pool}", "--kv-events=tcp://127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    mirror = Mirror()
    try:
        url = named_url(process)
        said = httpx.get(f"{url}/worker", timeout=WAIT_S).json()
        assert len(said["fingerprint"]) == 64 and said["pool"] == f"shm:{pool}"
        [events], [replay] = said["kv_events"], said["kv_replay"]
        subscriber = Subscriber(events, replay, mirror.deliver, page_size=said["page_size"])
        subscriber.start()
        prompt = [5 + i % 90 for i in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        tokens = prompt + answer["choices"][0]["token_ids"]
        # The last token was never fed.
        names = set(page_hashes(tokens[:-1], PAGE))
        assert len(names) == 5
        wait_for(lambda: mirror.state == {DEVICE: names, POOL: names})
        process.terminate()
        assert process.wait(60) == 0
        wait_for(lambda: mirror.state == {DEVICE: set(), POOL: set()})
        assert subscriber.progress.malformed == 0
        subscriber.close()
    finally:
        process.kill()
        process.communicate()
        pool_path(pool).unlink(missing_ok=True)
