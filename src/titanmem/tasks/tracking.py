"""State tracking: the answer at every place depends on all tokens before it (Titans, Theorem 4.1: beyond TC⁰).

Parity: bits, and whether so many ones have come as makes it odd. S5: permutations of five things, and their product.
"""

from __future__ import annotations

from itertools import permutations
from typing import ClassVar

import torch

from titanmem.config import require
from titanmem.tasks.base import Level, Rows, Task


class Parity(Task):
    """Levels: length."""

    name: ClassVar[str] = "parity"
    vocab_size = 2

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        bits = torch.randint(0, 2, (rows, _length(level)), generator=generator)
        return Rows(bits, bits.cumsum(1) % 2)

    def chance(self, level: Level) -> float:
        return 1 / 2


class Permutations(Task):
    """Tokens are the 120 permutations of five things, targets the running product. Levels: length."""

    name: ClassVar[str] = "s5"
    vocab_size = 120

    def __init__(self) -> None:
        every = torch.tensor(list(permutations(range(5))))
        weights = 5 ** torch.arange(5)
        place = torch.full((5**5,), -1)
        place[every @ weights] = torch.arange(120)
        after = every[:, every]  # [a, b, i] = a[b[i]]
        self.table = place[after @ weights]

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        ids = torch.randint(0, 120, (rows, _length(level)), generator=generator)
        product, found = ids[:, 0], [ids[:, 0]]
        for t in range(1, ids.shape[1]):
            product = self.table[ids[:, t], product]
            found.append(product)
        return Rows(ids, torch.stack(found, 1))

    def chance(self, level: Level) -> float:
        return 1 / 120


def _length(level: Level) -> int:
    length = int(level["length"])
    require(length >= 1, f"a row needs at least one token, got length {length}")
    return length
