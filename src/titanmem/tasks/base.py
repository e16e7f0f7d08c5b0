"""What all tasks share: rows of ids with questions in them, made from a generator and stored nowhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from titanmem.config import check_keys, check_type, require

IGNORED = -100  # no question here

Level = Mapping[str, Any]  # how hard a row is: {"length": 256, "pairs": 32}
TRIES = 100  # rows in which a level must ask something


class Rows(NamedTuple):
    """ids [rows, length] and what a model should predict at every place, IGNORED where nothing is asked."""

    ids: Tensor
    targets: Tensor


class Task(ABC):
    """A task makes rows of any level; the same generator makes the same rows."""

    name: ClassVar[str]
    vocab_size: int
    summary_id: int | None = None  # a token whose representation alone answers what is asked from it on
    level_keys: ClassVar[dict[str, Any]] = {}  # what a level may say besides its length, and the type of it

    @abstractmethod
    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        """So many rows of one level."""

    def check(self, level: Level) -> None:
        """Raise if there are no such rows, if some could fail later, or if they ask nothing."""
        self.length_of(level)
        check_keys(level, ["length", *self.level_keys], f"a level of {self.name}")
        for key, hint in self.level_keys.items():
            if key in level:
                check_type(f"{key} in a level of {self.name}", hint, level[key])
        generator = generator_of(0)
        try:
            rows = (self.batch(1, level, generator) for _ in range(TRIES))
            asks = any(bool((row.targets != IGNORED).any()) for row in rows)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.name} does not understand the level {dict(level)}: {error}") from error
        require(asks, f"of {TRIES} rows of {self.name} at the level {dict(level)} none asks anything; make them longer")

    def length_of(self, level: Level) -> int:
        """The length that a level asks for."""
        length = level.get("length") if isinstance(level, Mapping) else None
        fits = type(length) is int and length >= 0
        require(fits, f"a level of {self.name} has a length, a whole number, got {level}")
        return int(level["length"])

    @abstractmethod
    def chance(self, level: Level) -> float:
        """The accuracy of guessing among the answers that are possible."""


def generator_of(*numbers: int) -> torch.Generator:
    """A generator for a row, step or sample, another one for other numbers."""
    mixed = 0
    for number in numbers:  # a linear congruence over the numbers: neighbours land far apart
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    return torch.Generator().manual_seed(mixed)


def accuracy(predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Right answers and questions of every row."""
    asked = targets != IGNORED
    return ((predicted == targets) & asked).sum(1), asked.sum(1)


def share(right: Tensor, asked: Tensor) -> tuple[float, float]:
    """The share of right answers in all rows, and its standard error; the answers of one row are one draw."""
    right, asked, rows = right.double(), asked.double(), len(right)
    total = asked.sum()
    found = right.sum() / total
    spread = (right - found * asked).square().sum() * rows / max(1, rows - 1)
    return float(found), float(spread.sqrt() / total)
