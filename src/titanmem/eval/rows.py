"""Suites of tasks whose answers are asked within the row: recall, MAD, state tracking, and needle and BABILong where an
exact answer counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from titanmem.config import Config, check_counts, check_types, require
from titanmem.eval.subject import Subject
from titanmem.eval.suite import Cell, Measure, Result, Suite, mean
from titanmem.recipes.tasks import TASKS as RECIPES
from titanmem.tasks import Task, generator_of, open_task
from titanmem.tasks.babilong import TASKS as STORIES
from titanmem.tasks.babilong import Babilong, story_files
from titanmem.tasks.base import IGNORED
from titanmem.tasks.haystack import Haystack, haystack_files
from titanmem.tasks.needle import Needle
from titanmem.tasks.text import TextTask
from titanmem.train.plots import draw_map, new_figure

SHOTS = 3  # examples for a model that does not know the form of BABILong


def ask(subject: Subject, task: Task, level: dict[str, Any], rows: int, seed: int) -> list[tuple[float, float]]:
    """Of every row: the share of right answers, and whether all are right. Rows that ask nothing are not taken, and
    each has its own generator: they are the same however many are read at once."""
    length = int(level["length"])
    most = max(1, subject.piece // length) if length else 1  # stories alone have different lengths
    drawn = (task.batch(1, level, generator_of(seed, length, number)) for number in count())
    asking = (row for row in drawn if bool((row.targets != IGNORED).any()))
    found: list[tuple[float, float]] = []
    while len(found) < rows:
        taken = list(islice(asking, min(most, rows - len(found))))
        ids, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
        _, first, _ = subject.read(ids, targets)
        right, asked = first.sum(1), (targets != IGNORED).sum(1)
        found += [(float(r / a), float(r == a)) for r, a in zip(right, asked, strict=True)]
    return found


@dataclass(frozen=True)
class TaskSuite(Config, Suite):
    """Accuracy at every level of some tasks. `settings` are the tasks' own, as in a recipe; by default those of the run
    that was trained on the task, where it is the only one."""

    tasks: Sequence[str] = ()
    levels: Sequence[dict[str, Any]] = ()  # default: those that the recipe tests
    settings: dict[str, Any] = field(default_factory=dict)
    rows: int = 100
    seed: int = 1

    known: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[dict[str, str]] = {
        "task": "task", "length": "length", "score": "accuracy", "stderr": "± stderr", "exact": "all right",
        "n": "rows", "chance": "chance",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "rows")
        for task in self.tasks:
            require(task in self.known, f"{self.name} knows {', '.join(self.known)}, got {task!r}")
        require(all("length" in level for level in self.levels), f"every level has a length, got {self.levels}")

    def fitted(self, subject: Subject) -> Self:
        own = not self.settings and tuple(self.tasks or self.known) == (subject.task,)
        return replace(self, settings=subject.settings) if own else self

    def open(self, subject: Subject) -> Measure:
        made = {name: open_task(name, subject.tokenizer, **self.settings) for name in self.tasks or self.known}
        for name, task in made.items():
            require(
                task.vocab_size <= subject.vocab_size,
                f"{name} has {task.vocab_size} ids and the model {subject.vocab_size}: it was not trained for this "
                f"task, or the task's settings differ{self._hint(subject)}",
            )
            require(
                task.summary_id == subject.model.config.summary_id,
                f"{name} and the model have different summary tokens ({task.summary_id}, "
                f"{subject.model.config.summary_id}): it was not trained for this task{self._hint(subject)}",
            )
        for cell in self.cells():
            made[cell["task"]].check(_level(cell))

        def measure(cell: Cell) -> Result:
            task = made[cell["task"]]
            found = ask(subject, task, _level(cell), self.rows, self.seed)
            exact = sum(whole for _, whole in found) / len(found)
            return {**mean(share for share, _ in found), "exact": exact, "chance": task.chance(cell)}

        return measure

    def _hint(self, subject: Subject) -> str:
        """How to ask for what the model was trained on."""
        return (
            f'; give {self.name}.tasks=["{subject.task}"]' if len(self.known) > 1 and subject.task in self.known else ""
        )

    def cells(self) -> list[Cell]:
        names = self.tasks or self.known
        return [{"task": name, **level} for name in names for level in self.levels or RECIPES[name]["tests"]]

    def figure(self, results: list[Result]) -> Any:
        figure, (axis,) = new_figure(1, width=6)
        for name in dict.fromkeys(r["task"] for r in results):
            mine = sorted(
                (r["length"], r["score"], r["stderr"] or 0, r["chance"]) for r in results if r["task"] == name
            )
            lengths, scores, errors, chances = zip(*mine, strict=True)
            drawn = axis.errorbar(lengths, scores, errors, marker="o", markersize=4, capsize=2, label=name)
            for chance in sorted(set(chances)):
                axis.axhline(chance, color=drawn[0].get_color(), lw=1, ls=":")
        axis.plot([], [], color="0.6", lw=1, ls=":", label="chance")
        axis.set(xscale="log", ylim=(0, 1.03), xlabel="length", ylabel="accuracy")
        axis.legend(frameon=False, fontsize=8)
        return figure


def _level(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name != "task"}


@dataclass(frozen=True)
class RecallSuite(TaskSuite):
    name: ClassVar[str] = "recall"
    known: ClassVar[tuple[str, ...]] = ("recall",)


@dataclass(frozen=True)
class MadSuite(TaskSuite):
    name: ClassVar[str] = "mad"
    known: ClassVar[tuple[str, ...]] = tuple(name for name in RECIPES if name.startswith("mad-"))


@dataclass(frozen=True)
class TrackingSuite(TaskSuite):
    name: ClassVar[str] = "tracking"
    known: ClassVar[tuple[str, ...]] = ("parity", "s5")


@dataclass(frozen=True)
class TextSuite(Config, Suite):
    """What needle and BABILong share: samples of a cell, scored by an exact answer (read in one pass) or, as RULER
    does, by whether `answer_tokens` generated tokens contain it."""

    samples: int = 20
    score: str = "exact"
    answer_tokens: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "samples", "answer_tokens")
        require(self.score in ("exact", "contains"), f"score is 'exact' or 'contains', got {self.score!r}")
        for name in ("kinds", "lengths", "depths", "tasks"):
            given = getattr(self, name, None)
            require(given is None or len(given) > 0, f"{self.name}.{name} is a list of some, got {given!r}")

    def ask(self, subject: Subject, task: TextTask, level: dict[str, Any]) -> Result:
        """The share of right answers to a level's samples."""
        if self.score == "exact":
            return mean(whole for _, whole in ask(subject, task, level, self.samples, self.seed))
        right = []
        for number in range(self.samples):
            sample = task.sample(self.room(level), generator_of(self.seed, int(level["length"]), number))
            found = subject.answer(sample.prompt, self.answer_tokens, (task.tokenizer.end,))
            said = self.said(task.tokenizer.decode(found))
            right.append(float(sample.answer.lower() in said.lower()))
        return mean(right)

    def said(self, text: str) -> str:
        """The part of a generated text in which the answer counts."""
        return text

    def check(self, task: TextTask, levels: Sequence[dict[str, Any]]) -> None:
        """Whether every level can be asked."""
        for level in levels:
            task.check(level if self.score == "exact" else self.room(level))

    def room(self, level: dict[str, Any]) -> dict[str, Any]:
        """The level without the tokens that are generated: a length includes them."""
        return {**level, "length": max(0, int(level["length"]) - self.answer_tokens)}


@dataclass(frozen=True)
class NeedleSuite(TextSuite):
    """Single needles of these kinds at every length and depth. `kinds` and `text` are by default those of the run that
    was trained on needles, and else pk."""

    kinds: Sequence[str] | None = None
    lengths: Sequence[int] = (1024, 2048, 4096)
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    text: str | None = None  # a folder of .txt files; needed for all kinds but pk

    name: ClassVar[str] = "needle"
    columns: ClassVar[dict[str, str]] = {
        "kind": "needle", "length": "length", "depth": "depth", "score": "found", "stderr": "± stderr", "n": "samples",
    }  # fmt: skip

    def fitted(self, subject: Subject) -> Self:
        own = subject.settings if subject.task == Needle.name else {}
        return replace(self, kinds=self.kinds or [own.get("kind", "pk")], text=self.text or own.get("text"))

    def files(self) -> list[Path]:
        return haystack_files(self.text) if self.text and self.hidden != ("pk",) else []

    @property
    def hidden(self) -> tuple[str, ...]:
        """The kinds that are asked."""
        return tuple(self.kinds or ("pk",))

    def open(self, subject: Subject) -> Measure:
        words = subject.words()
        texts = {kind: None if kind == "pk" else self.text for kind in self.hidden}
        made = {kind: Needle(words, kind, Haystack.folder(t, words) if t else None) for kind, t in texts.items()}
        for task in made.values():
            self.check(task, [{"length": n, "depth": depth} for n in self.lengths for depth in self.depths])
        return lambda cell: self.ask(subject, made[cell["kind"]], cell)

    def cells(self) -> list[Cell]:
        return [
            {"kind": kind, "length": length, "depth": depth}
            for kind in self.hidden for length in self.lengths for depth in self.depths
        ]  # fmt: skip

    def figure(self, results: list[Result]) -> Any:
        figure, axes = new_figure(len(self.hidden), width=5)
        for axis, kind in zip(axes, self.hidden, strict=True):
            grid = [[_find(results, kind, n, d) for n in self.lengths] for d in self.depths]
            shown = draw_map(axis, grid, self.lengths, self.depths)
            axis.set(xlabel="length, tokens", ylabel="depth of the needle", title=f"needle {kind}: found, %")
            figure.colorbar(shown, ax=axis, fraction=0.04)
        return figure


def _find(results: list[Result], kind: str, length: int, depth: float) -> float:
    wanted = (kind, length, depth)
    return next(float(r["score"]) for r in results if (r["kind"], r["length"], r["depth"]) == wanted)


@dataclass(frozen=True)
class BabilongSuite(TextSuite):
    """Facts of bAbI in long text; `facts` is the folder of bAbI v1.2, `text` one of .txt files. `shots` solved examples
    come first; by default as many as in the run that was trained on BABILong, whose facts and text are used if none are
    given, and three for any other model."""

    facts: str = ""
    text: str = ""
    tasks: Sequence[int] = (1, 2, 3, 4, 5)
    lengths: Sequence[int] = (1024, 2048, 4096)
    shots: int | None = None

    name: ClassVar[str] = "babilong"
    columns: ClassVar[dict[str, str]] = {
        "qa": "task", "length": "length", "shots": "shots", "score": "right", "stderr": "± stderr", "n": "samples",
        "chance": "chance",
    }  # fmt: skip

    def fitted(self, subject: Subject) -> Self:
        trained = subject.task == Babilong.name
        own = subject.settings if trained else {}
        shots = self.shots
        if shots is None:
            shots = own.get("shots", 0) if trained else SHOTS
        return replace(
            self, facts=self.facts or own.get("facts", ""), text=self.text or own.get("text", ""), shots=shots
        )

    def files(self) -> list[Path]:
        stories = [story_files(self.facts, qa, split)[:1] for qa in STORIES for split in ("test", "train")]
        return [*(file for some in stories for file in some), *haystack_files(self.text)]

    def open(self, subject: Subject) -> Measure:
        require(bool(self.facts and self.text), "give babilong.facts (the folder of bAbI v1.2) and babilong.text")
        shots = self.fitted(subject).shots
        assert shots is not None
        task = Babilong.open(subject.words(), self.facts, self.text, shots=shots)
        self.check(task, self.cells())
        return lambda cell: {"shots": shots, **self.ask(subject, task, cell), "chance": task.chance(cell)}

    def cells(self) -> list[Cell]:
        return [{"qa": task, "length": length} for task in self.tasks for length in self.lengths]

    def room(self, level: dict[str, Any]) -> dict[str, Any]:
        return level  # the answer is one word

    def said(self, text: str) -> str:
        return text.strip().partition("\n")[0]  # after it a model asks itself the next question

    def figure(self, results: list[Result]) -> Any:
        figure, (axis,) = new_figure(1, width=6)
        for task in self.tasks:
            mine = [(r["length"], r["score"]) for r in results if r["qa"] == task]
            axis.plot(*zip(*mine, strict=True), marker="o", markersize=4, label=f"QA{task}")
        axis.set(xscale="log", ylim=(0, 1.03), xlabel="length, tokens", ylabel="right answers")
        axis.legend(frameon=False, fontsize=8)
        return figure
