"""A server whose engine has two data ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.serving.server.support import OPTIONS, wait_for

LONG = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 4000, "ignore_eos": True}


def test_ranks_share_requests_and_are_shown_apart(scripted):
    """Three requests on two ranks of four slots; beside eight running ones one more may wait."""
    made = scripted(
        lambda request: [7] * request.max_new_tokens,
        options=replace(OPTIONS, max_queue=1),
        step_s=0.01,
        ranks=2,
    )
    with made as served, ThreadPoolExecutor(12) as threads:

        def running() -> list[int]:
            return served.on_engine(lambda engine: [len(rank.running) for rank in engine.ranks])

        answers = [threads.submit(served.post, "/v1/completions", LONG) for _ in range(3)]
        wait_for(lambda: sum(running()) == 3)
        assert sorted(running()) == [1, 2]
        page = served.get("/metrics").text
        for rank, count in enumerate(running()):
            assert f'vllm:num_requests_running{{engine="{rank}",model_name="tiny"}} {count}' in page
            assert f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="tiny"}} 0.0' in page
        answers += [threads.submit(served.post, "/v1/completions", LONG) for _ in range(6)]
        # One may wait before the slots are taken: all eight have to be, too.
        wait_for(lambda: running() == [4, 4])
        wait_for(lambda: served.metrics()["vllm:num_requests_waiting"] == 1)
        assert served.post("/v1/completions", LONG).status_code == 429
        served.on_engine(lambda engine: setattr(engine.executor, "fail", True))
        assert {answer.result(60).status_code for answer in answers} == {500}
