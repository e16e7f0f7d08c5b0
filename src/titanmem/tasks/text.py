"""Tasks in words: a prompt, an answer, and rows of both for training.

A row is prompt + answer + end of document; the answer's tokens, and mostly the end, are what is asked. A model that
predicts all of them at their places is one whose greedy continuation is the answer: exact matches need no generation.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from titanmem.config import require
from titanmem.data.tokenizer import Tokenizer
from titanmem.tasks.base import IGNORED, Level, Rows, Task
from titanmem.tasks.haystack import Haystack


@dataclass(frozen=True)
class Sample:
    """One question: the prompt's ids, the answer as text and as ids that follow the prompt. `ends`: the end of the
    document is asked too. `earlier`: where in the prompt other questions are answered, which are asked as well."""

    prompt: list[int]
    answer: str
    answer_ids: list[int]
    ends: bool = True
    earlier: tuple[slice, ...] = ()


class TextTask(Task):
    """A task whose rows are made of sentences."""

    def __init__(self, tokenizer: Tokenizer, haystack: Haystack) -> None:
        self.tokenizer, self.haystack = tokenizer, haystack
        self.vocab_size = tokenizer.vocab_size

    @abstractmethod
    def sample(self, level: Level, generator: torch.Generator) -> Sample:
        """A question of exactly level["length"] tokens, prompt, answer and end together."""

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        made = [self.row(self.sample(level, generator)) for _ in range(rows)]
        return Rows(torch.stack([r.ids for r in made]), torch.stack([r.targets for r in made]))

    def row(self, sample: Sample) -> Rows:
        """ids and targets [length] of one sample."""
        whole = torch.tensor([*sample.prompt, *sample.answer_ids, self.tokenizer.end])
        asked = len(sample.answer_ids) + 1
        targets = torch.full_like(whole, IGNORED)
        targets[-asked - 1 : -1] = whole[-asked:]
        for place in sample.earlier:
            targets[place.start - 1 : place.stop - 1] = whole[place]
        if not sample.ends:
            targets[-2] = IGNORED
        return Rows(whole[:-1], targets[:-1])

    def chance(self, level: Level) -> float:
        return 0.0  # an answer of several tokens is not guessed

    def scatter(
        self, pieces: list[list[int]], depths: list[float], tokens: int, generator: torch.Generator
    ) -> tuple[list[int], list[int]]:
        """So many tokens of the haystack with pieces put between its sentences, at these depths of [0, 1]; and where
        each piece begins."""
        out: list[int] = []
        starts, read = [0] * len(pieces), 0
        waiting = sorted(zip(depths, range(len(pieces)), strict=True))
        for sentence in (*self.haystack.fill(tokens, generator), None):  # None: what is left comes last
            while waiting and (sentence is None or waiting[0][0] * tokens <= read + len(sentence) / 2):
                index = waiting.pop(0)[1]
                starts[index] = len(out)
                out += pieces[index]
            out += sentence or []
            read += len(sentence or [])
        return out, starts


def room_for(length: int, fixed: int, what: str) -> int:
    """Tokens left for the haystack."""
    require(length >= fixed, f"length {length} is shorter than {what} alone: at least {fixed} tokens are needed")
    return length - fixed
