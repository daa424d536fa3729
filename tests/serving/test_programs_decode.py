"""Several steps a dispatch, stop ids and lengths on the device."""

import jax
import numpy as np
import pytest

from tests.serving.support import (
    Step,
    assert_close,
    decode_batch,
    request,
    stacked,
    trimmed,
)
from tests.tolerances import ACROSS_BUCKETS_ABS


@pytest.fixture(scope="module")
def prompts(tokens):
    return [trimmed(request(tokens[k : k + n], k)) for k, n in enumerate((20, 3, 37))]


@pytest.fixture
def prefilled(bench, prompts):
    return bench.prompt(bench.new_cache(), prompts)


@pytest.fixture(scope="module")
def free_run(bench, prompts) -> Step:
    """Eight single steps without any end, [8, B]."""
    cache, _ = bench.prompt(bench.new_cache(), prompts)
    return bench.greedy(cache, decode_batch(prompts), 8)[1]


def read(decoded) -> Step:
    return Step(np.asarray(decoded.sampled.token), np.asarray(decoded.sampled.logprob))


def test_four_steps_in_one_dispatch_are_four_dispatches(bench, prompts, prefilled, free_run):
    cache, batch, parts = prefilled[0], decode_batch(prompts), []
    for _ in range(2):
        cache, decoded = bench.decode(cache, batch, steps=4)
        assert np.asarray(decoded.active)[:, :3].all()
        batch = decoded.batch
        parts += [Step.of(jax.tree.map(lambda a, i=i: a[i], decoded.sampled)) for i in range(4)]
    live = (slice(None), slice(0, 3))
    assert_close(stacked(parts).place(live), free_run.place(live), ACROSS_BUCKETS_ABS)
    np.testing.assert_array_equal(
        np.asarray(batch.position)[:3], [prompt.stop + 8 for prompt in prompts]
    )


def test_the_loop_ends_when_all_have_stopped(bench, prompts, prefilled):
    """Steps that did not run left their outputs empty."""
    last = [prompts[0].stop + 2, prompts[1].stop + 1, prompts[2].stop + 2]
    cache, decoded = bench.decode(prefilled[0], decode_batch(prompts, last=last), steps=4)
    active = np.asarray(decoded.active)
    assert active.tolist() == [
        [True, True, True, False],
        [True, False, True, False],
        [False] * 4,
        [False] * 4,
    ]
    assert not np.asarray(decoded.sampled.logprob)[2:].any()
    assert not np.asarray(decoded.batch.active).any()
    assert np.asarray(decoded.batch.position)[:3].tolist() == last
    _, idle = bench.decode(cache, decoded.batch, steps=4)
    assert not np.asarray(idle.active).any() and not np.asarray(idle.sampled.logprob).any()


@pytest.mark.parametrize("steps", [1, 4])
def test_a_stop_id_ends_its_own_request(bench, prompts, prefilled, free_run, steps):
    """The stop id itself is the last token; the others go on as if nothing had happened."""
    stop = int(free_run.token[1, 0])
    end = free_run.token[:, 0].tolist().index(stop) + 1
    assert stop not in free_run.token[:4, 1:3] and end <= 2
    batch = decode_batch(prompts, stop_ids=[[300, 301, stop], [], []])
    cache, active, out = prefilled[0], [], []
    for _ in range(4 // steps):
        cache, decoded = bench.decode(cache, batch, steps=steps)
        batch = decoded.batch
        active.append(np.asarray(decoded.active))
        out.append(read(decoded).token)
    active, out = np.concatenate(active), np.concatenate(out)
    assert active[:, 0].tolist() == [i < end for i in range(4)]
    assert active[:, 1:3].all()
    np.testing.assert_array_equal(out[:end, 0], free_run.token[:end, 0])
    np.testing.assert_array_equal(out[:, 1:3], free_run.token[:4, 1:3])
    assert np.asarray(batch.position)[0] == prompts[0].stop + end


def test_stop_ids_belong_to_their_place(bench, prompts, prefilled, free_run):
    """The first token of one request as the stop id of another, and -1 as none, end nothing."""
    foreign = int(free_run.token[0, 1])
    assert foreign not in free_run.token[:4, 0]
    batch = decode_batch(prompts, stop_ids=[[foreign, -1, -1, -1]])
    _, decoded = bench.decode(prefilled[0], batch, steps=4)
    assert np.asarray(decoded.active)[:, :3].all()


def test_a_request_without_room_takes_one_step_at_most(bench, prompts, prefilled):
    last = [prompt.stop + 1 for prompt in prompts]
    _, decoded = bench.decode(prefilled[0], decode_batch(prompts, last=last))
    assert np.asarray(decoded.active)[0, :3].all()
    assert not np.asarray(decoded.batch.active).any()
