"""Rows of a batch as the host builds them."""

import numpy as np

from serving.batch import Segment, build_rows, page_tables
from serving.programs import Bucket

TOKENS = (10, 11, 12, 13, 14, 15)


def test_rows_of_segments():
    bucket = Bucket(requests=3, rows=4, pages=3)
    segments = [
        Segment(TOKENS, 2, 5, slot=1, pages=(7, 8), floor=1, decoder_floor=2, write_from=3),
        Segment(TOKENS, 0, 1, slot=2, pages=(9,)),
    ]
    rows = build_rows(segments, bucket, lookback=3)
    assert rows.tokens.tolist() == [[12, 13, 14, 0], [10, 0, 0, 0], [0] * 4]
    assert rows.start.tolist() == [2, 0, 0] and rows.length.tolist() == [3, 1, 0]
    assert rows.slot.tolist() == [1, 2, 0]
    assert rows.previous.tolist() == [[-1, 10, 11], [-1] * 3, [-1] * 3]
    assert rows.page_table.tolist() == [[7, 8, -1], [9, -1, -1], [-1] * 3]
    floors = rows.floor, rows.decoder_floor, rows.write_from
    assert [f.tolist() for f in floors] == [[1, 0, 0], [2, 0, 0], [3, 0, 0]]
    assert not rows.image.any()
    arrays = [a for name, a in vars(rows).items() if name != "image"]
    assert {a.dtype for a in arrays} == {np.dtype(np.int32)} and rows.image.dtype == bool


def test_image_tokens_are_barriers_in_the_history():
    segment = Segment(TOKENS, 3, 6, 0, (), image=frozenset({1, 2, 4}))
    rows = build_rows([segment], Bucket(1, 4, 1), lookback=3)
    assert rows.previous.tolist() == [[10, -1, -1]]
    assert rows.image.tolist() == [[False, True, False, False]]


def test_an_empty_segment_behind_its_prompt():
    """A short prompt in a batch whose longer ones still have chunks to come."""
    rows = build_rows([Segment(TOKENS, 32, 32, 0, (1,))], Bucket(1, 4, 1), lookback=3)
    assert rows.length.tolist() == [0]


def test_page_tables_are_padded():
    assert page_tables([[4], []], Bucket(3, 1, 2)).tolist() == [[4, -1], [-1, -1], [-1, -1]]
