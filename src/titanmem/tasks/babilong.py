"""BABILong (Kuratov et al. 2024, arXiv 2406.10149; Titans, Figure 6): the facts of a bAbI story scattered in long text,
then its question. Stories come from the files of bAbI v1.2 (qa1_…_train.txt, qa1_…_test.txt); nothing is stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
    """What has been told when a question is asked."""

    facts: tuple[str, ...]
    question: str
    answer: str


def read_stories(folder: str | Path, task: int, split: str = "test") -> list[Story]:
    """All questions of one bAbI file."""
    found = sorted(Path(folder).rglob(f"qa{task}_*_{split}.txt"))
    require(
        bool(found),
        f"{folder} holds no qa{task}_*_{split}.txt; give the folder of bAbI v1.2, for instance tasks_1-20_v1-2/en-10k",
    )
    stories: list[Story] = []
    facts: list[str] = []
    for number, line in enumerate(found[0].read_text().splitlines(), 1):
        if not line.strip():
            continue
        parts = re.fullmatch(r"(\d+) ([^\t]*)(?:\t([^\t]*)(?:\t.*)?)?", line)
        require(parts is not None, f"{found[0]}, line {number}: no line of bAbI: {line[:80]!r}")
        assert parts is not None
        if int(parts[1]) == 1:
            facts = []
        text = parts[2].strip()
        if parts[3] is None:
            facts.append(text)
        else:
            stories.append(Story(tuple(facts), text, parts[3].strip()))
    return stories


class Babilong(TextTask):
    """Levels: length (0: the story alone) and qa (1–5); index: that story instead of a random one."""

    name: ClassVar[str] = "babilong"

    def __init__(
        self, tokenizer: Tokenizer, stories: dict[int, list[Story]], haystack: Haystack, shots: int = 0
    ) -> None:
        super().__init__(tokenizer, haystack)
        self.stories, self.shots = stories, shots

    @classmethod
    def open(
        cls, tokenizer: Tokenizer, folder: str | Path, text: str | Path, split: str = "test", shots: int = 0
    ) -> Babilong:
        """Stories of all tasks in `folder`, noise from `text`."""
        stories = {task: read_stories(folder, task, split) for task in TASKS}
        return cls(tokenizer, stories, Haystack.folder(text, tokenizer), shots)

    def sample(self, level: Level, generator: torch.Generator) -> Sample:
        task, length = int(level.get("qa", 1)), int(level["length"])
        require(task in self.stories, f"BABILong has the tasks {', '.join(map(str, self.stories))}, got {task}")
        pool = self.stories[task]
        index = level.get("index")
        story = pool[int(torch.randint(0, len(pool), (), generator=generator)) if index is None else int(index)]
        examples = [pool[i] for i in torch.randint(0, len(pool), (self.shots,), generator=generator).tolist()]
        shown = "".join(
            " ".join(e.facts) + ASK.format(question=e.question) + f" {e.answer}\n\n" for e in examples if e != story
        )
        before, after = self.tokenizer.encode_batch([shown, ASK.format(question=story.question)])
        answer = self.tokenizer.encode(f" {story.answer}")
        facts = self.tokenizer.encode_batch([f"{fact} " for fact in story.facts])
        fixed = len(before) + sum(map(len, facts)) + len(after) + len(answer) + 1
        if length == 0:
            return Sample(before + [t for fact in facts for t in fact] + after, story.answer, answer)
        room = room_for(length, fixed, "the story and its question")
        depths = torch.rand(len(facts), generator=generator).sort().values.tolist()
        return Sample(before + self.scatter(facts, depths, room, generator) + after, story.answer, answer)

    def chance(self, level: Level) -> float:
        answers = {story.answer for story in self.stories[int(level.get("qa", 1))]}
        return 1 / len(answers)
