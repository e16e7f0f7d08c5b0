"""The small tasks of MAD (Poli et al. 2024, arXiv 2403.17844), from its descriptions: recall, recall of keys and values
of several tokens, recall among noise, selective copying, memorisation of a fixed table, compression into one vector.

Ids: content first (keys, then values), then noise, then marks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from titanmem.config import require
from titanmem.tasks.base import IGNORED, Level, Rows, Task, generator_of


class InContextRecall(Task):
    """Pairs of key and value one after the other; whenever a key comes back, its value is asked. A row has its own
    table. Levels: length."""

    name: ClassVar[str] = "mad-recall"
    noise = 0.0

    def __init__(self, vocab_size: int = 16) -> None:
        require(
            vocab_size % 2 == 0 and vocab_size >= 4, f"vocab_size holds keys and values: even, ≥ 4, got {vocab_size}"
        )
        self.half = vocab_size // 2
        self.vocab_size = vocab_size

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        places = _even(level["length"]) // 2
        table = torch.randint(0, self.half, (rows, self.half), generator=generator)
        keys = torch.randint(0, self.half, (rows, places), generator=generator)
        values = table.gather(1, keys)
        again = (keys.unsqueeze(2) == keys.unsqueeze(1)).tril(-1).any(2)
        ids = torch.stack([keys, values + self.half], 2)
        targets = torch.stack([torch.where(again, values + self.half, IGNORED), torch.full_like(keys, IGNORED)], 2)
        return Rows(ids.flatten(1), targets.flatten(1))

    def chance(self, level: Level) -> float:
        return 1 / self.half


class NoisyRecall(InContextRecall):
    """The same with noise between the pairs. Levels: length."""

    name: ClassVar[str] = "mad-noisy-recall"

    def __init__(self, vocab_size: int = 16, noise_size: int = 16, share: float = 0.2) -> None:
        super().__init__(vocab_size)
        require(noise_size >= 1, f"noise_size must be at least 1, got {noise_size}")
        require(0 <= share < 1, f"share, of noise, lies in [0, 1), got {share}")
        self.noise_size, self.share = noise_size, share
        self.vocab_size = vocab_size + noise_size

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        length = int(level["length"])
        pairs = int(length * (1 - self.share)) // 2
        require(pairs >= 2, f"length {length} has no room for two pairs among {self.share:.0%} noise")
        inner = super().batch(rows, {"length": 2 * pairs}, generator)
        units = length - pairs  # a pair or one token of noise
        chosen = torch.rand(rows, units, generator=generator).argsort(1)[:, :pairs].sort(1).values
        starts = chosen + torch.arange(pairs)  # every pair before takes one place more
        low = self.half * 2
        ids = torch.randint(low, low + self.noise_size, (rows, length), generator=generator)
        targets = torch.full((rows, length), IGNORED)
        places = torch.stack([starts, starts + 1], 2).flatten(1)
        return Rows(ids.scatter(1, places, inner.ids), targets.scatter(1, places, inner.targets))


class FuzzyRecall(Task):
    """Keys and values of one to `longest` tokens; a key that comes back asks for every token of its value. Levels:
    length."""

    name: ClassVar[str] = "mad-fuzzy-recall"

    def __init__(self, vocab_size: int = 16, keys: int = 8, longest: int = 3) -> None:
        require(vocab_size % 2 == 0 and vocab_size >= 4, f"vocab_size must be even and at least 4, got {vocab_size}")
        require(longest >= 1, f"longest, of keys and values, must be at least 1, got {longest}")
        require(  # with more, short keys could begin every other one
            1 <= keys <= vocab_size // 2,
            f"keys must lie in [1, vocab_size // 2 = {vocab_size // 2}], since no key begins another, got {keys}; give "
            f"keys={vocab_size // 2}, or a larger vocab_size",
        )
        self.half, self.keys, self.longest = vocab_size // 2, keys, longest
        self.vocab_size = vocab_size + 1
        self.pad = vocab_size

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        length = int(level["length"])
        made = [self._row(length, generator) for _ in range(rows)]
        return Rows(torch.stack([ids for ids, _ in made]), torch.stack([targets for _, targets in made]))

    def _row(self, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        table: dict[tuple[int, ...], list[int]] = {}
        while len(table) < self.keys:
            sizes = draw(1, self.longest + 1, 2)
            key = tuple(draw(0, self.half, sizes[0]))
            if not any(key[: len(k)] == k or k[: len(key)] == key for k in table):  # no key begins another
                table[key] = draw(self.half, 2 * self.half, sizes[1])
        known = list(table)
        ids: list[int] = []
        targets: list[int] = []
        seen = set()
        while True:
            key = known[draw(0, len(known), 1)[0]]
            value = table[key]
            if len(ids) + len(key) + len(value) > length:
                break
            asks = key in seen
            seen.add(key)
            ids += [*key, *value]
            targets += [IGNORED] * (len(key) - 1) + (value if asks else [IGNORED] * len(value)) + [IGNORED]
        rest = length - len(ids)
        return torch.tensor(ids + [self.pad] * rest), torch.tensor(targets + [IGNORED] * rest)

    def chance(self, level: Level) -> float:
        return 1 / self.half


class SelectiveCopy(Task):
    """Tokens scattered among blanks, then as many marks: write the tokens down in order. Levels: length, tokens."""

    name: ClassVar[str] = "mad-selective-copy"
    level_keys: ClassVar[dict[str, Any]] = {"tokens": int}

    def __init__(self, vocab_size: int = 16) -> None:
        require(vocab_size >= 1, f"vocab_size must be at least 1, got {vocab_size}")
        self.content = vocab_size
        self.blank, self.mark = vocab_size, vocab_size + 1
        self.vocab_size = vocab_size + 2

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        length, count = int(level["length"]), int(level.get("tokens", 16))
        require(count >= 1, f"tokens must be at least 1, got {count}")
        body = length - count
        require(body >= count, f"length {length} has no room to show and copy {count} tokens: need {2 * count}")
        places = torch.rand(rows, body, generator=generator).argsort(1)[:, :count].sort(1).values
        tokens = torch.randint(0, self.content, (rows, count), generator=generator)
        ids = torch.full((rows, length), self.blank).scatter(1, places, tokens)
        ids[:, body:] = self.mark
        targets = torch.full((rows, length), IGNORED)
        targets[:, body:] = tokens
        return Rows(ids, targets)

    def chance(self, level: Level) -> float:
        return 1 / self.content


class Memorisation(Task):
    """A table that never changes: every key is followed by a mark, where its value is asked, which the row itself never
    shows. Levels: length."""

    name: ClassVar[str] = "mad-memorisation"

    def __init__(self, vocab_size: int = 256, seed: int = 0) -> None:
        require(vocab_size >= 2, f"vocab_size holds keys and values: at least 2, got {vocab_size}")
        self.half = vocab_size // 2
        self.mark = 2 * self.half
        self.vocab_size = 2 * self.half + 1
        self.table = torch.randint(0, self.half, (self.half,), generator=generator_of(seed, self.half)) + self.half

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        places = _even(level["length"]) // 2
        keys = torch.randint(0, self.half, (rows, places), generator=generator)
        ids = torch.stack([keys, torch.full_like(keys, self.mark)], 2).flatten(1)
        targets = torch.stack([torch.full_like(keys, IGNORED), self.table[keys]], 2).flatten(1)
        return Rows(ids, targets)

    def chance(self, level: Level) -> float:
        return 1 / self.half


class Compression(Task):
    """Random tokens, then a summary token and marks: at the j-th place from the summary on, the j-th token is asked.
    `summary_id` makes a model answer these places from the summary's representation alone. Levels: length, of which one
    half is compressed."""

    name: ClassVar[str] = "mad-compression"

    def __init__(self, vocab_size: int = 16) -> None:
        require(vocab_size >= 1, f"vocab_size must be at least 1, got {vocab_size}")
        self.content = vocab_size
        self.summary_id, self.mark = vocab_size, vocab_size + 1
        self.vocab_size = vocab_size + 2

    def batch(self, rows: int, level: Level, generator: torch.Generator) -> Rows:
        count = _even(level["length"]) // 2
        tokens = torch.randint(0, self.content, (rows, count), generator=generator)
        summary, marks = torch.full((rows, 1), self.content), torch.full((rows, count - 1), self.mark)
        return Rows(torch.cat([tokens, summary, marks], 1), torch.cat([torch.full_like(tokens, IGNORED), tokens], 1))

    def chance(self, level: Level) -> float:
        return 1 / self.content


def _even(length: int) -> int:
    require(length >= 4 and length % 2 == 0, f"the length of such a row is even and at least 4, got {length}")
    return int(length)
