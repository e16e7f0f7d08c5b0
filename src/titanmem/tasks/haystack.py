"""Long text to hide things in: encoded sentence by sentence, so that anything can be put between two of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from titanmem.config import require
from titanmem.data.tokenizer import Tokenizer

NOISE = ["The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back again. "]
MOST_CHARACTERS = 8_000_000  # of a folder, read in the order of names
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+[\"')\]]*\s*|[^.!?\n]+$")


class Haystack:
    """Sentences in order; a filling starts at a random one and goes round."""

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        self.sentences = [list(s) for s in sentences if len(s)]
        require(bool(self.sentences), "the haystack has no sentences; give a text that is not empty")

    @classmethod
    def noise(cls, tokenizer: Tokenizer) -> Haystack:
        """The same five sentences again and again."""
        return cls(tokenizer.encode_batch(NOISE))

    @classmethod
    def folder(cls, path: str | Path, tokenizer: Tokenizer) -> Haystack:
        """The .txt files of a folder, or one file."""
        sentences = [s for text in haystack_texts(path) for s in _SENTENCE.findall(text) if s.strip()]
        return cls(tokenizer.encode_batch(sentences))

    def fill(self, tokens: int, generator: torch.Generator) -> list[list[int]]:
        """Consecutive sentences of exactly so many tokens; the first is cut at its front."""
        start = int(torch.randint(0, len(self.sentences), (), generator=generator))
        chosen: list[list[int]] = []
        room = tokens
        while room > 0:  # from the last backwards: what is left over falls on the first
            sentence = self.sentences[(start - len(chosen)) % len(self.sentences)][-room:]
            chosen.append(sentence)
            room -= len(sentence)
        return chosen[::-1]


def haystack_texts(path: str | Path) -> Iterator[str]:
    """What is read of the .txt files of a folder, or of one file."""
    room = MOST_CHARACTERS
    for file in haystack_files(path):
        try:
            text = file.read_text(encoding="utf-8")[:room]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 ({error.reason}); convert the file or leave it out") from None
        yield text
        room -= len(text)
        if room <= 0:
            return


def haystack_files(path: str | Path) -> list[Path]:
    """The .txt files of a folder, or one file."""
    place = Path(path)
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    require(
        bool(files) and all(file.is_file() for file in files), f"{path} holds no text: give a .txt file or a folder"
    )
    return files
