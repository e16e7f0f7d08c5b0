"""Multi-query recall: pairs of key and value, then noise in which keys come back and their values are asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from titanmem.config import require
from titanmem.tasks.base import IGNORED, Level, Rows, Task


class Recall(Task):
    """Levels: length, pairs, and questions (default: each pair once)."""

    name: ClassVar[str] = "recall"
    level_keys: ClassVar[dict[str, Any]] = {"pairs": int, "questions": int | None}

    def __init__(self, vocab_size: int = 512) -> None:
        require(vocab_size >= 2, f"vocab_size holds keys and values: at least 2, got {vocab_size}")
        self.vocab_size = vocab_size

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        given = (level["length"], level["pairs"], self.vocab_size, level.get("questions"))
        return Rows(*recall_batch(rows, *given, generator=generator))

    def chance(self, level: Level) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)


def recall_batch(
    rows: int,
    length: int,
    pairs: int,
    vocab: int = 512,
    questions: int | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Inputs [rows, length] and targets, −100 where nothing is asked.

    Keys, different ones in a row, are ids below vocab // 2; values and noise are the others. A row begins with `pairs`
    pairs; each key comes back once, at a random later place, and the target there is its value. With `questions`, so
    many random keys of the row come back instead, some of them again and again. `generator` must live on `device`.
    """
    half = vocab // 2
    require(1 <= pairs <= half, f"pairs must lie in [1, vocab // 2 = {half}], got {pairs}")
    count = pairs if questions is None else questions
    require(count >= 1, f"questions must be at least 1, got {count}")
    need = 2 * pairs + count
    require(length >= need, f"length {length} has no room for {pairs} pairs and {count} questions: need {need}")

    def choose(width: int, count: int) -> Tensor:
        """`count` different numbers below `width` for every row."""
        return torch.rand(rows, width, generator=generator, device=device).argsort(1)[:, :count]

    def draw(width: int) -> Tensor:
        return torch.randint(half, vocab, (rows, width), generator=generator, device=device)

    keys, values, ids = choose(half, pairs), draw(pairs), draw(length)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    asked = choose(length - 2 * pairs, count) + 2 * pairs
    if questions is not None:
        which = torch.randint(0, pairs, (rows, count), generator=generator, device=device)
        keys, values = keys.gather(1, which), values.gather(1, which)
    targets = torch.full((rows, length), IGNORED, device=device)
    return ids.scatter(1, asked, keys), targets.scatter(1, asked, values)
