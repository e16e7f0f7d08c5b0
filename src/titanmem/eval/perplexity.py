"""Perplexity of text, read in windows or as one stream, and by position."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from titanmem.config import Config, check_counts, check_types, require
from titanmem.data.files import read_objects, read_text
from titanmem.data.tokenizer import Tokenizer
from titanmem.eval.subject import Subject
from titanmem.eval.suite import Cell, Measure, Result, Suite
from titanmem.train.evaluate import by_position
from titanmem.train.plots import new_figure, position_axis

READ = (".txt", ".md", ".rst", ".py", ".jsonl")


def documents(path: str) -> dict[str, str]:
    """The texts (`READ`; of .jsonl the key "text") of a folder, or one file, by their names in it; each line of .jsonl
    is a document."""
    place = Path(path)
    files = sorted(f for f in place.rglob("*") if f.suffix in READ) if place.is_dir() else [place]
    require(
        bool(files) and all(f.is_file() for f in files),
        f"{path} is neither a file nor a folder with files of text ({', '.join(READ)})",
    )
    found = {}
    for file in files:
        name = file.name if file == place else file.relative_to(place).as_posix()
        if file.suffix != ".jsonl":
            found[name] = read_text(file)
            continue
        for number, held in read_objects(file):
            text = held.get("text") if isinstance(held, dict) else None
            require(isinstance(text, str), f"{file}, line {number}: expected an object with a text, got {held!r:.60}")
            found[f"{name}:{number}"] = str(text).encode(errors="replace").decode()
    for name, text in found.items():
        require(bool(text.strip()), f"{path}: {name} holds no text; leave it out")
    return found


def encode_document(words: Tokenizer, name: str, text: str) -> list[int]:
    """Its tokens; an error names the document."""
    try:
        return words.encode(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def windows(tokens: list[int], end: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of disjoint windows, each with the token before it as context; the first with `end`."""
    rows = [tokens[i : i + length] for i in range(0, len(tokens), length)]
    before = [end, *(tokens[i - 1] for i in range(length, len(tokens), length))]
    ids = torch.full((len(rows), length), end)
    targets = torch.full((len(rows), length), -100)
    for i, (row, first) in enumerate(zip(rows, before, strict=True)):
        ids[i, : len(row)] = torch.tensor([first, *row[:-1]])
        targets[i, : len(row)] = torch.tensor(row)
    return ids, targets


@dataclass(frozen=True)
class PerplexitySuite(Config, Suite):
    """`windows`: every `length` tokens from a fresh state, as lm-evaluation-harness does it; `stream`: a document from
    its first to its last token, with the state carried on."""

    text: str = ""  # a folder or a file
    modes: Sequence[str] = ("windows", "stream")
    length: int = 2048
    most_tokens: int = 200_000  # of one document

    name: ClassVar[str] = "perplexity"
    reads: ClassVar[tuple[str, ...]] = ("text",)
    columns: ClassVar[dict[str, str]] = {
        "document": "document", "mode": "read", "tokens": "tokens", "loss": "nats a token", "perplexity": "ppl",
        "word_perplexity": "ppl a word", "bits_per_byte": "bits a byte",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length", "most_tokens")
        for mode in self.modes:
            require(mode in ("windows", "stream"), f"modes are 'windows' and 'stream', got {mode!r}")
        require(bool(self.text), "give perplexity.text, a folder or a file of text")

    def cells(self) -> list[Cell]:
        return [{"document": name, "mode": mode} for name in documents(self.text) for mode in self.modes]

    def open(self, subject: Subject) -> Measure:
        words, texts = subject.words(), documents(self.text)
        for name, text in texts.items():
            encode_document(words, name, text[:1000])

        def measure(cell: Cell) -> Result:
            text = texts[cell["document"]]
            tokens = encode_document(words, cell["document"], text)[: self.most_tokens]
            share = len(words.decode(tokens)) / max(1, len(text))
            length = self.length if cell["mode"] == "windows" else max(1, len(tokens))
            ids, targets = windows(tokens, words.end, length)
            chances = []
            for part in torch.arange(len(ids)).split(max(1, subject.piece // length)):
                chances.append(subject.read(ids[part], targets[part])[0])
            total = -torch.cat(chances).sum().item()
            count = {"words": len(re.split(r"\s+", text)) * share, "bytes": len(text.encode()) * share}
            return {
                "tokens": len(tokens), "loss": total / len(tokens),
                "perplexity": math.exp(min(700, total / len(tokens))),
                "word_perplexity": math.exp(min(700, total / count["words"])),
                "bits_per_byte": total / count["bytes"] / math.log(2),
                "by_position": by_position(-torch.cat(chances), targets >= 0),
            }  # fmt: skip

        return measure

    def figure(self, results: list[Result]) -> Any:
        figure, (axis,) = new_figure(1, width=6)
        longest = sorted(results, key=lambda r: -r["tokens"])[:8]
        for result in longest:
            places = result["by_position"]
            middle = [(p["from"] + p["to"]) / 2 for p in places]
            style = "-" if result["mode"] == "stream" else ":"
            label = f"{result['document']}, {result['mode']}"
            axis.plot(middle, [p["loss"] for p in places], style, marker="o", markersize=3, label=label)
        position_axis(axis, max((r["by_position"] for r in longest), key=len))
        axis.set(xlabel="position", ylabel="loss, nats a token")
        axis.legend(frameon=False, fontsize=7)
        return figure
