"""Prompts have the length that is asked for and hold, at the depth that is asked for, what the question is about."""

from __future__ import annotations

import re

import pytest
import torch

from titanmem.data.tokenizer import ByteTokenizer
from titanmem.tasks.babilong import Babilong, Story, read_stories
from titanmem.tasks.base import generator_of
from titanmem.tasks.haystack import Haystack
from titanmem.tasks.needle import KINDS, Needle

BYTES = ByteTokenizer()
TEXT = "It was late. Nobody spoke! The train had left an hour before,\nand the next would come at dawn. " * 20


@pytest.fixture
def haystack(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    return Haystack.folder(tmp_path, BYTES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [700, 1003])
def test_a_reader_finds_the_needle_in_a_prompt_of_the_asked_length(haystack, kind, length):
    task = Needle(BYTES, kind, None if kind == "pk" else haystack)
    for number in range(5):
        sample = task.sample({"length": length}, generator_of(number))
        prompt = BYTES.decode(sample.prompt)
        key = re.search(r"for (\S+) mentioned in the provided text\?", prompt)[1]
        assert re.search(rf"for {key} is: (\S+)\. ", prompt)[1] == sample.answer
        assert len(sample.prompt) + len(sample.answer_ids) + 1 == length


def test_the_needle_lies_at_its_depth():
    task = Needle(BYTES)
    places = []
    for depth in (0, 0.25, 0.5, 0.75, 1):
        sample = task.sample({"length": 4000, "depth": depth}, generator_of(1))
        places.append(BYTES.decode(sample.prompt).index("One of the") / len(sample.prompt))
    assert places == sorted(places)
    assert all(abs(place - depth) < 0.1 for place, depth in zip(places, (0, 0.25, 0.5, 0.75, 1), strict=True))


def test_rows_ask_for_the_answer_and_the_end():
    task = Needle(BYTES)
    ids, targets = task.batch(2, {"length": 600}, generator_of(0))
    assert ids.shape == (2, 599)
    for row, target in zip(ids, targets, strict=True):
        asked = target[target >= 0].tolist()
        assert asked[-1] == BYTES.end
        assert re.fullmatch(r" \d{7}", BYTES.decode(asked))
        where = int(torch.nonzero(target >= 0)[0])
        assert BYTES.decode(row[where + 1 :].tolist()) == BYTES.decode(asked[:-1])


def test_all_of_several_needles_are_asked_and_their_answers_stand_in_the_text():
    task = Needle(BYTES)
    level = {"length": 1100, "needles": 3}
    for number in range(5):
        sample = task.sample(level, generator_of(number))
        row = task.row(sample)
        text = BYTES.decode(sample.prompt)
        asked = re.findall(r"for (\S+) mentioned in the provided text\?", text)
        answers = [re.search(rf"for {key} is: (\d{{7}})\. ", text)[1] for key in asked]
        assert len(set(asked)) == 3
        assert len(row.ids) == level["length"] - 1
        assert BYTES.decode(row.targets[row.targets >= 0].tolist()) == "".join(f" {answer}" for answer in answers)
        following = torch.cat([row.ids[1:], torch.tensor([BYTES.end])])
        assert torch.equal(following[row.targets >= 0], row.targets[row.targets >= 0])


@pytest.mark.parametrize("needles", [0, -1, 1.5, True, "2", 10**5])
def test_needles_that_are_no_count_are_refused(needles):
    with pytest.raises(ValueError, match="needles is a whole number from 1 to"):
        Needle(BYTES).check({"length": 2000, "needles": needles})


def test_a_length_that_holds_only_short_keys_is_refused_before_the_first_row():
    task = Needle(BYTES)
    with pytest.raises(ValueError, match=r"at least (\d+) tokens") as refused:
        task.check({"length": 1})
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    task.check({"length": least})
    short = 0
    for number in range(200):
        task.sample({"length": least}, generator_of(number))
        try:
            task.sample({"length": least - 12}, generator_of(number))
            short += 1
        except ValueError:
            pass
    assert 0 < short < 200


def test_a_prompt_that_is_too_short_names_what_is_needed():
    with pytest.raises(ValueError, match=r"length 100 is shorter than needle, question and answer alone: at least \d+"):
        Needle(BYTES).sample({"length": 100}, generator_of(0))


STORY = Story(("Mary went home.", "John took the apple.", "Mary went out."), "Where is Mary?", "out")


def test_facts_keep_their_order_in_the_noise(haystack):
    task = Babilong(BYTES, {1: [STORY]}, haystack)
    for number in range(5):
        sample = task.sample({"length": 900, "qa": 1}, generator_of(number))
        prompt = BYTES.decode(sample.prompt)
        places = [prompt.index(fact) for fact in STORY.facts]
        assert places == sorted(places)
        assert prompt.endswith("\nQuestion: Where is Mary?\nAnswer:")
        assert len(sample.prompt) + len(sample.answer_ids) + 1 == 900
    alone = task.sample({"length": 0}, generator_of(0))
    assert (
        BYTES.decode(alone.prompt)
        == "Mary went home. John took the apple. Mary went out. \nQuestion: Where is Mary?\nAnswer:"
    )


def test_earlier_questions_of_a_story_are_asked_where_they_stand(haystack, tmp_path):
    lines = ["Mary went home.", "Where is Mary?\thome\t1", "John slept.", "Mary went out.", "Where is Mary?\tout\t4"]
    lines += ["Where is John?\tin bed\t3"]
    (tmp_path / "qa1_x_train.txt").write_text("".join(f"{n} {line}\n" for n, line in enumerate(lines, 1)))
    task = Babilong(BYTES, {1: read_stories(tmp_path, 1, "train")}, haystack)
    for questions, answers in ((1, " in bed"), (2, " out in bed"), (3, " home out in bed"), (9, " home out in bed")):
        sample = task.sample({"length": 900, "index": 2, "questions": questions}, generator_of(questions))
        row, prompt = task.row(sample), BYTES.decode(sample.prompt)
        asked = row.targets[row.targets >= 0].tolist()
        assert asked == [*BYTES.encode(answers), BYTES.end]
        assert len(sample.prompt) + len(sample.answer_ids) + 1 == 900
        assert ("Mary went home. \nQuestion: Where is Mary?\nAnswer: home\n" in prompt) == (questions > 2)
        assert ("Mary went out. \nQuestion: Where is Mary?\nAnswer: out\n" in prompt) == (questions > 1)
    with pytest.raises(ValueError, match="questions is a whole number from 1 on, got 0"):
        task.check({"length": 900, "questions": 0})


def places(count, start=0):
    """Different stories: somebody goes through numbered rooms."""
    return [
        Story((f"Ann went to room {i}.", *("Ann slept.",) * (i % 5)), "Where is Ann?", f"room {i}")
        for i in range(start, start + count)
    ]


def test_examples_are_short_solved_and_of_other_stories(haystack):
    task = Babilong(BYTES, {1: places(40)}, haystack, shots=3, examples={1: places(40, 100)})
    form = r"Ann went to room (\d+)\. (?:Ann slept\. )?\nQuestion: Where is Ann\?\nAnswer: room (\d+)"
    for number in range(5):
        sample = task.sample({"length": 900}, generator_of(number))
        *examples, last = BYTES.decode(sample.prompt).split("\n\n", 3)
        assert last.endswith("Answer:")
        for example in examples:
            room = re.fullmatch(form, example)
            assert room[1] == room[2] != sample.answer.split()[1]
        assert len(sample.prompt) + len(sample.answer_ids) + 1 == 900
        row = task.row(sample)
        assert BYTES.decode(row.targets[row.targets >= 0].tolist()) == f" {sample.answer}"  # no end is asked

    told = Story(STORY.facts[:2], "Where is Mary?", "home")
    task = Babilong(BYTES, {1: [STORY, told, *places(12)]}, haystack, shots=3)
    for number in range(20):
        sample = task.sample({"length": 900, "index": 0}, generator_of(number))
        assert all("Mary" not in example for example in BYTES.decode(sample.prompt).split("\n\n", 3)[:3])


def test_stories_that_do_not_fit_are_left_out(haystack):
    long = Story(("Ann slept. " * 60,), "Who?", "Ann")
    task = Babilong(BYTES, {1: [long, STORY]}, haystack)
    assert {task.sample({"length": 200}, generator_of(i)).answer for i in range(9)} == {"out"}
    assert {task.sample({"length": 900}, generator_of(i)).answer for i in range(9)} == {"out", "Ann"}
    with pytest.raises(ValueError, match=r"length 50 is shorter than every story of QA1: at least \d+"):
        task.check({"length": 50})


def test_babi_files_are_read_and_broken_lines_are_named(tmp_path):
    file = tmp_path / "qa1_single_test.txt"
    first = "1 Mary went home.\n2 Where is Mary? \thome\t1\n3 John slept.\n4 Where is Mary?\thome\t1\n"
    file.write_text(first + "1 Ann ran.\n2 Who ran?\tAnn\t1\n")
    stories = read_stories(tmp_path, 1)
    assert [s.answer for s in stories] == ["home", "home", "Ann"]
    assert stories[1].facts == ("Mary went home.", "John slept.")
    assert stories[2].facts == ("Ann ran.",)
    file.write_text("1 Mary went home.\nWhere?\n")
    with pytest.raises(ValueError, match="line 2"):
        read_stories(tmp_path, 1)
    with pytest.raises(ValueError, match=r"qa2_\*_test.txt"):
        read_stories(tmp_path, 2)
