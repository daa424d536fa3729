"""Bounded replay as arithmetic (ARCHITECTURE section 17, decisions 5 and 6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replay import adopted_hit, decoder_floor, prefill_start, window_floor

WINDOW = 128


@pytest.mark.parametrize(
    ("matched", "hit", "start"),
    [(0, 0, 0), (64, 0, 0), (127, 0, 0), (128, 0, 0), (129, 129, 1), (192, 192, 64)],
)
def test_hits_no_longer_than_the_window_are_not_adopted(matched, hit, start):
    assert adopted_hit(matched, WINDOW) == hit
    assert prefill_start(hit, WINDOW) == window_floor(hit, WINDOW) == start


@pytest.mark.parametrize(("length", "floor"), [(1, 0), (127, 0), (128, 0), (129, 1), (1000, 872)])
def test_the_decoder_floor_counts_rows_of_the_whole_prompt(length, floor):
    assert decoder_floor(length, WINDOW, replay=True) == floor
    assert decoder_floor(length, WINDOW, replay=False) == 0


@given(st.integers(0, 10_000), st.integers(1, 256), st.integers(1, 1000))
def test_the_encoder_makes_every_row_that_the_replay_reads(matched, window, new):
    hit = adopted_hit(matched, window)
    length = hit + new
    start = prefill_start(hit, window)
    assert 0 <= start <= decoder_floor(length, window, replay=True)
    assert start == 0 or hit - start == window
