"""Task files and what counts as solved."""

import json

import pytest

from dsv41_jax.errors import UserError
from serving.quality.tasks import Task, read_tasks


def written(tmp_path, *lines):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return str(path)


def test_both_formats_are_read(tmp_path):
    plain = {"prompt": "The capital of France is", "answer": " Paris"}
    gsm8k = {"question": "What is 6 * 200?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}
    first, second = read_tasks(written(tmp_path, json.dumps(plain), "", json.dumps(gsm8k)))
    assert first == Task(plain["prompt"], " Paris", number=False)
    assert second == Task("Question: What is 6 * 200?\nAnswer:", "1,200", number=True)


@pytest.mark.parametrize(
    ("text", "solved"),
    [(" Paris, of course", True), ("Paris", True), ("Parisian", False), ("It is Paris", False)],
)
def test_a_text_begins_with_the_answer(text, solved):
    assert Task("?", " Paris", number=False).solved(text) == solved


@pytest.mark.parametrize(
    ("text", "solved"),
    [
        ("so 3 and then 1200.", True),
        ("1200 or 1300", False),
        ("= 7\n#### 1,200\nQuestion: 9", True),
        ("#### 12001", False),
        ("1200\n####", False),
        ("none", False),
        ("1200.0", True),
    ],
)
def test_a_number_is_the_last_one_or_behind_the_mark(text, solved):
    assert Task("?", "1,200", number=True).solved(text) == solved


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: answer must be a text"),
        ('{"prompt": "a", "answer": " "}', "line 2: answer must be a text"),
        ('{"answer": "b"}', "line 2: must have either prompt or question"),
        ('{"prompt": "a", "question": "a", "answer": "b"}', "line 2: must have either"),
        ('{"question": "a", "answer": "b"}', "line 2: answer must end in #### and a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = written(tmp_path, '{"prompt": "a", "answer": "b"}', line)
    with pytest.raises(UserError, match=message):
        read_tasks(path)


def test_no_task_is_an_error(tmp_path):
    with pytest.raises(UserError, match="at least one task"):
        read_tasks(written(tmp_path, ""))
