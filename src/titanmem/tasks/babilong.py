"""BABILong (Kuratov et al. 2024, arXiv 2406.10149; Titans, Figure 6): the facts of a bAbI story scattered in long text,
then its question. Stories come from the files of bAbI v1.2 (qa1_…_train.txt, qa1_…_test.txt); nothing is stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from titanmem.config import require
from titanmem.data.tokenizer import Tokenizer
from titanmem.tasks.base import Level
from titanmem.tasks.haystack import Haystack
from titanmem.tasks.text import Sample, TextTask, room_for

TASKS = (1, 2, 3, 4, 5)
ASK = "\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Story:
    """What has been told when a question is asked. `earlier`: those before it, each with the facts told by then."""

    facts: tuple[str, ...]
    question: str
    answer: str
    earlier: tuple[Story, ...] = ()


def story_files(folder: str | Path, task: int, split: str) -> list[Path]:
    """The files that may hold the stories of a task; the first is read."""
    return sorted(Path(folder).rglob(f"qa{task}_*_{split}.txt"))


def read_stories(folder: str | Path, task: int, split: str = "test") -> list[Story]:
    """All questions of one bAbI file."""
    found = story_files(folder, task, split)
    require(
        bool(found),
        f"{folder} holds no qa{task}_*_{split}.txt; give the folder of bAbI v1.2, for instance tasks_1-20_v1-2/en-10k",
    )
    stories: list[Story] = []
    facts: list[str] = []
    earlier: list[Story] = []
    for number, line in enumerate(found[0].read_text().splitlines(), 1):
        if not line.strip():
            continue
        parts = re.fullmatch(r"(\d+) ([^\t]*)(?:\t([^\t]*)(?:\t.*)?)?", line)
        require(parts is not None, f"{found[0]}, line {number}: no line of bAbI: {line[:80]!r}")
        assert parts is not None
        if int(parts[1]) == 1:
            facts, earlier = [], []
        text = parts[2].strip()
        if parts[3] is None:
            facts.append(text)
        else:
            stories.append(Story(tuple(facts), text, parts[3].strip(), tuple(earlier)))
            earlier.append(Story(tuple(facts), text, parts[3].strip()))
    return stories


class Babilong(TextTask):
    """Levels: length (0: the story alone) and qa (1–5); index: that story instead of a random one that fits; questions:
    how many of the story's are asked, the last ones (default: 1), each where bAbI asks it: more to learn from a row.

    With `shots`, so many solved examples, the shortest ones of `examples`, come first, and what is asked is the answer
    alone: a model that never learnt this form goes on with whatever it likes."""

    name: ClassVar[str] = "babilong"
    level_keys: ClassVar[dict[str, Any]] = {"qa": int, "index": int | None, "questions": int}

    def __init__(
        self,
        tokenizer: Tokenizer,
        stories: dict[int, list[Story]],
        haystack: Haystack,
        shots: int = 0,
        examples: dict[int, list[Story]] | None = None,
    ) -> None:
        super().__init__(tokenizer, haystack)
        require(shots >= 0, f"shots is a number of examples, got {shots}")
        self.stories, self.shots = stories, shots
        self.examples = {qa: shortest(pool) for qa, pool in (examples or stories).items()} if shots else {}
        for qa, pool in self.examples.items():
            require(len(pool) > shots, f"QA{qa} has {len(pool)} short stories, too few for {shots} examples")
        self._ids: dict[str, list[int]] = {}  # of every sentence: bAbI has few different ones
        self._fitting: dict[tuple[int, int, int], list[Story]] = {}

    @classmethod
    def open(
        cls, tokenizer: Tokenizer, folder: str | Path, text: str | Path, split: str = "test", shots: int = 0
    ) -> Babilong:
        """Stories of the tasks that `folder` has, noise from `text`. Examples are training stories where there are."""

        def there(split: str) -> dict[int, list[Story]]:
            found = [task for task in TASKS if story_files(folder, task, split)]
            return {task: read_stories(folder, task, split) for task in found}

        stories = there(split) or {1: read_stories(folder, 1, split)}  # which says what is missing
        examples = {**stories, **(there("train") if shots else {})}
        return cls(tokenizer, stories, Haystack.folder(text, tokenizer), shots, examples)

    def sample(self, level: Level, generator: torch.Generator) -> Sample:
        task, length = int(level.get("qa", 1)), int(level["length"])
        require(task in self.stories, f"there are no stories of QA{task}, only of {', '.join(map(str, self.stories))}")
        index, count = level.get("index"), questions_of(level)
        pool = self.stories[task] if index is not None or length == 0 else self.fitting(task, length, count)
        story = pool[int(torch.randint(0, len(pool), (), generator=generator)) if index is None else int(index)]
        before = self._examples(task, story, generator)
        pieces, places = self._told(story, count)
        after, answer = self._ends(story)
        fixed = len(before) + sum(map(len, pieces)) + len(after) + len(answer) + 1
        room = room_for(length, fixed, "the story and its question") if length else 0
        depths = torch.rand(len(pieces), generator=generator).sort().values.tolist()
        told, starts = self.scatter(pieces, depths, room, generator)
        shifts = [len(before) + start for start in starts]
        earlier = tuple(slice(shifts[n] + at.start, shifts[n] + at.stop) for n, at in places)
        return Sample(before + told + after, story.answer, answer, ends=not self.shots, earlier=earlier)

    def check(self, level: Level) -> None:
        length = self.length_of(level)
        super().check({**level, "length": 0})
        if length:
            self.fitting(int(level.get("qa", 1)), length, questions_of(level))

    def fitting(self, task: int, length: int, questions: int = 1) -> list[Story]:
        """The stories of a task that fit into a length with so many questions, whichever examples come first."""
        if (task, length, questions) not in self._fitting:
            shown = sorted(self._tokens(example) for example in self.examples.get(task, []))[-self.shots :]
            room = length - (sum(shown) if self.shots else 0)
            sizes = [self._tokens(story, questions) for story in self.stories[task]]
            found = [story for story, size in zip(self.stories[task], sizes, strict=True) if size <= room]
            least = min(sizes) + length - room
            require(
                bool(found),
                f"length {length} is shorter than every story of QA{task}"
                f"{f' with {self.shots} examples' if self.shots else ''}: at least {least} tokens are needed",
            )
            self._fitting[task, length, questions] = found
        return self._fitting[task, length, questions]

    def _examples(self, task: int, story: Story, generator: torch.Generator) -> list[int]:
        """Solved examples that do not belong to the story that is asked about."""
        shown: list[int] = []
        left = self.shots
        pool = self.examples.get(task, [])
        for place in torch.randperm(len(pool), generator=generator).tolist() if left else ():
            example = pool[place]
            if left and not overlap(example, story):
                after, answer = self._ends(example)
                told = [token for piece in self._told(example)[0] for token in piece]
                shown += told + after + answer + self._encode("\n\n")
                left -= 1
        require(not left, f"QA{task} has too few other stories for {self.shots} examples")
        return shown

    def _ends(self, story: Story) -> tuple[list[int], list[int]]:
        """Question and answer."""
        return self._encode(ASK.format(question=story.question)), self._encode(f" {story.answer}")

    def _told(self, story: Story, questions: int = 1) -> tuple[list[list[int]], list[tuple[int, slice]]]:
        """The facts, each followed by the earlier ones of so many questions that come after it; and of every answer
        among them its fact's number and its place there."""
        pieces = [self._encode(f"{fact} ") for fact in story.facts]
        places = []
        for one in story.earlier[max(0, len(story.earlier) - questions + 1) :]:
            number, (question, answer) = len(one.facts) - 1, self._ends(one)
            begin = len(pieces[number]) + len(question)
            places.append((number, slice(begin, begin + len(answer))))
            pieces[number] = [*pieces[number], *question, *answer, *self._encode("\n")]
        return pieces, places

    def _tokens(self, story: Story, questions: int = 1) -> int:
        """Tokens of a story, its questions and answers, and what ends it."""
        told = sum(map(len, self._told(story, questions)[0]))
        return told + sum(map(len, self._ends(story))) + max(1, len(self._encode("\n\n")))

    def _encode(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self.tokenizer.encode(text)
        return self._ids[text]

    def chance(self, level: Level) -> float:
        answers = {story.answer for story in self.stories[int(level.get("qa", 1))]}
        return 1 / len(answers)


def told_stories(folder: str | Path) -> Iterator[str]:
    """The training stories that a folder has, as they are told and asked."""
    for task in [task for task in TASKS if story_files(folder, task, "train")] or TASKS[:1]:  # or what is missing
        for story in read_stories(folder, task, "train"):
            yield f"{' '.join(story.facts)} {ASK.format(question=story.question)} {story.answer}"


def questions_of(level: Level) -> int:
    """How many questions a level asks."""
    questions = level.get("questions", 1)
    require(type(questions) is int and questions >= 1, f"questions is a whole number from 1 on, got {questions!r}")
    return int(questions)


def shortest(stories: list[Story]) -> list[Story]:
    """Those with the fewest facts."""
    return sorted(stories, key=lambda story: len(story.facts))[: max(16, len(stories) // 50)]


def overlap(one: Story, other: Story) -> bool:
    """Whether one is told with the other: questions of the same story share its first facts."""
    return all(a == b for a, b in zip(one.facts, other.facts, strict=False))
