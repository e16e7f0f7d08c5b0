"""Tasks that separate architectures: rows with questions, made from a generator and stored nowhere. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from itertools import chain
from typing import Any

from titanmem.config import check_keys, check_type, require
from titanmem.data.tokenizer import Tokenizer
from titanmem.tasks.babilong import Babilong, told_stories
from titanmem.tasks.base import Level, Rows, Task, generator_of
from titanmem.tasks.haystack import NOISE, Haystack, haystack_texts
from titanmem.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorisation, NoisyRecall, SelectiveCopy
from titanmem.tasks.needle import Needle
from titanmem.tasks.recall import Recall
from titanmem.tasks.tracking import Parity, Permutations

MAD = (InContextRecall, FuzzyRecall, NoisyRecall, SelectiveCopy, Memorisation, Compression)
TOKEN_TASKS: dict[str, Callable[..., Task]] = {task.name: task for task in (Recall, *MAD, Parity, Permutations)}
TEXT_TASKS = (Needle.name, Babilong.name)
NAMES = (*TOKEN_TASKS, *TEXT_TASKS)


def open_task(name: str, tokenizer: Tokenizer | None = None, **settings: Any) -> Task:
    """A task by its name. Those in words need a tokenizer; needle takes kind and text, BABILong facts, text, split and
    shots, the others their own sizes."""
    if name not in NAMES:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(NAMES)}")
    text_tasks: dict[str, Callable[..., Task]] = {Needle.name: _needle, Babilong.name: _babilong}
    made = TOKEN_TASKS.get(name) or text_tasks[name]
    known = {key: p.annotation for key, p in signature(made, eval_str=True).parameters.items() if key != "tokenizer"}
    check_keys(settings, list(known), f"the task {name!r}")
    for key, value in settings.items():
        check_type(f"{key} of the task {name!r}", known[key], value)
    if name in TOKEN_TASKS:
        return made(**settings)
    if tokenizer is None:
        raise ValueError(f"the task {name!r} is in words: give a tokenizer")
    return made(tokenizer, **settings)


def _needle(tokenizer: Tokenizer, kind: str = "pk", text: str | None = None) -> Needle:
    return Needle(tokenizer, kind, None if text is None else Haystack.folder(text, tokenizer))


def _babilong(tokenizer: Tokenizer, facts: str = "", text: str = "", split: str = "test", shots: int = 0) -> Babilong:
    _check_places(facts, text)
    return Babilong.open(tokenizer, facts, text, split, shots)


def _check_places(facts: str, text: str) -> None:
    require(
        bool(facts and text),
        "the task 'babilong' needs facts, the folder of bAbI v1.2, and text, a folder of .txt files; for a run: "
        """task.settings='{"facts": "en-10k/", "text": "novels/", "split": "train"}'""",
    )


def task_texts(name: str, facts: str = "", text: str = "", **settings: Any) -> Iterable[str]:
    """What a tokenizer for a task in words is trained on: its noise, and BABILong's training stories."""
    if name != Babilong.name:
        return haystack_texts(text) if text else NOISE
    _check_places(facts, text)
    return chain(told_stories(facts), haystack_texts(text))


__all__ = ["NAMES", "TEXT_TASKS", "TOKEN_TASKS", "Level", "Rows", "Task", "generator_of", "open_task", "task_texts"]
