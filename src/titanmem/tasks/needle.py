"""Needle in a haystack, RULER's single needle (Hsieh et al. 2024, arXiv 2404.06654; Titans, Table 2).

pk   five sentences of noise again and again, a number of seven digits
n    essays or novels, a number of seven digits
w    essays or novels, a word
uuid the same with a UUID
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch

from titanmem.config import require
from titanmem.data.tokenizer import Tokenizer
from titanmem.tasks.base import Level, generator_of
from titanmem.tasks.haystack import Haystack
from titanmem.tasks.text import Sample, TextTask, room_for

KINDS = {"pk": "number", "n": "number", "w": "word", "uuid": "uuid"}

NEEDLE = " One of the special magic {type}s for {key} is: {value}. "
BEFORE = (
    "A special magic {type} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{type} afterwards.\n"
)
AFTER = (
    "\nWhat is the special magic {type} for {key} mentioned in the provided text? The special magic {type} for {key} "
    "mentioned in the provided text is"
)
ADJECTIVES = (  # noqa: SIM905
    "ample amber apt bold brave brisk broad calm clear clever cool crisp dapper deep eager early fair fancy fine "
    "firm fond free fresh gentle glad grand great hardy keen kind large late light lively lucky mellow merry mild "
    "modest neat noble plain plucky polite prime proud quick quiet rapid rare ready rich round sharp shiny silent "
    "simple sleek slim smart smooth sober soft solid spare steady sturdy sunny sweet swift tall tame tidy tiny vast "
    "vivid warm wide wise young"
).split()
NOUNS = (  # noqa: SIM905
    "acorn anchor apple arch arrow badge basin basket beacon bell bench berry birch bird boat bridge brook bucket "
    "cabin candle canyon castle cedar chair cherry circle cliff cloud clover comet copper coral cradle crane creek "
    "crown dawn delta desert dove drum eagle echo ember falcon feather fern field flame flute forest fountain fox "
    "garden gate glacier harbor hazel hill island ivory jewel kettle lake lantern laurel leaf lemon lily linen "
    "maple meadow mirror moon oak ocean olive orchard otter owl paper pearl pebble pine planet plum pond prairie "
    "quartz rabbit raven reed ribbon river robin rocket rose saddle sail sand shadow shell silver spark spruce star "
    "stone storm stream summit thistle tiger timber tower trail tulip valley velvet violet walnut wave whistle "
    "willow window winter wren"
).split()


class Needle(TextTask):
    """Levels: length, depth in [0, 1] (default: anywhere), and the number of needles (default: one). Several lie
    anywhere and are all asked, one after the other: more to learn from a row, and more to hold."""

    name: ClassVar[str] = "needle"
    level_keys: ClassVar[dict[str, Any]] = {"depth": float | None, "needles": int}

    def __init__(self, tokenizer: Tokenizer, kind: str = "pk", haystack: Haystack | None = None) -> None:
        require(kind in KINDS, f"unknown needle {kind!r}; known: {', '.join(KINDS)}")
        require(
            kind == "pk" or haystack is not None, f"needle {kind!r} is hidden in a text: give a folder or a .txt file"
        )
        super().__init__(tokenizer, haystack or Haystack.noise(tokenizer))
        self.kind, self.type = kind, KINDS[kind]

    def sample(self, level: Level, generator: torch.Generator) -> Sample:
        hidden: dict[str, str] = {}
        while len(hidden) < needles_of(level):
            hidden[word(generator)] = self.value(generator)
        depths = [self._depth(level, generator) for _ in hidden]
        parts = [self._parts(key, value) for key, value in hidden.items()]
        before = parts[0][0]
        fixed = len(before) + sum(len(piece) for part in parts for piece in part[1:]) + 1
        room = room_for(int(level["length"]), fixed, "needle, question and answer")
        prompt = before + self.scatter([part[1] for part in parts], depths, room, generator)[0]
        earlier = []
        for _, _, question, answer in parts[:-1]:
            start = len(prompt) + len(question)
            earlier.append(slice(start, start + len(answer)))
            prompt = prompt + question + answer
        _, _, question, answer = parts[-1]
        return Sample(prompt + question, list(hidden.values())[-1], answer, earlier=tuple(earlier))

    def _depth(self, level: Level, generator: torch.Generator) -> float:
        given = level.get("depth")
        depth = float(torch.rand((), generator=generator)) if given is None else float(given)
        require(0 <= depth <= 1, f"the needle's depth lies in [0, 1], got {depth}")
        return depth

    def _parts(self, key: str, value: str) -> list[list[int]]:
        """What stands before the text, the needle, the question and the answer."""
        texts = [part.format(type=self.type, key=key, value=value) for part in (BEFORE, NEEDLE, AFTER)]
        return self.tokenizer.encode_batch([*texts, f" {value}"])

    def check(self, level: Level) -> None:
        """The longest keys and values must fit, not only those of the first sample."""
        before, others = self.most
        most = before + needles_of(level) * others + 1
        room_for(self.length_of(level), most, "needle, question and answer")
        super().check({**level, "length": most})

    @cached_property
    def most(self) -> tuple[int, int]:
        """Tokens of what stands before the text, and of needle, question and answer with the key and the value that
        take most."""
        every = [f"{first}-{second}" for first in ADJECTIVES for second in NOUNS]
        sizes = [len(ids) for ids in self.tokenizer.encode_batch([f" {key}" for key in every])]
        key = every[sizes.index(max(sizes))]
        values = [key] if self.type == "word" else [self.value(generator_of(seed)) for seed in range(100)]
        parts = [self._parts(key, value) for value in values]
        return len(parts[0][0]), max(sum(map(len, part[1:])) for part in parts)

    def value(self, generator: torch.Generator) -> str:
        """What is hidden."""
        if self.type == "word":
            return word(generator)
        if self.type == "uuid":
            digits = "".join(f"{d:x}" for d in torch.randint(0, 16, (32,), generator=generator).tolist())
            return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
        return str(int(torch.randint(1_000_000, 10_000_000, (), generator=generator)))


def needles_of(level: Level) -> int:
    """How many needles a level hides."""
    needles = level.get("needles", 1)
    most = len(ADJECTIVES) * len(NOUNS) // 2  # each has a key of its own
    require(
        type(needles) is int and 1 <= needles <= most, f"needles is a whole number from 1 to {most}, got {needles!r}"
    )
    return int(needles)


def word(generator: torch.Generator) -> str:
    """An adjective and a noun."""
    first, second = (words[int(torch.randint(0, len(words), (), generator=generator))] for words in (ADJECTIVES, NOUNS))
    return f"{first}-{second}"
