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
from titanmem.eval.suite import Cell, Measure, Result, Suite, perplexity_of
from titanmem.tasks.base import IGNORED
from titanmem.train.evaluate import by_position, spread_of
from titanmem.train.plots import new_figure, position_axis

READ = (".txt", ".md", ".rst", ".py", ".jsonl")


def text_files(path: str) -> list[Path]:
    """The files of text (`READ`) in a folder, or one file."""
    place = Path(path)
    files = sorted(f for f in place.rglob("*") if f.suffix in READ) if place.is_dir() else [place]
    require(
        bool(files) and all(f.is_file() for f in files),
        f"{path} is neither a file nor a folder with files of text ({', '.join(READ)})",
    )
    return files


def documents(path: str) -> dict[str, str]:
    """The texts (of .jsonl the key "text") of a folder, or one file, by their names in it; each line of .jsonl is a
    document."""
    place, found = Path(path), {}
    for file in text_files(path):
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


def windows(tokens: list[int], end: int, length: int, stride: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of windows that end `stride` tokens (default: `length`) after each other, the last with the
    text; each has the token before it as context, the first has `end`. A token is a target once, in the first window
    that holds it."""
    step = stride or length
    stops = [*range(length, len(tokens), step), len(tokens)]
    ids, targets = torch.full((len(stops), length), end), torch.full((len(stops), length), IGNORED)
    whole, reached = torch.tensor([end, *tokens]), 0
    for i, stop in enumerate(stops):
        start = max(0, stop - length)
        ids[i, : stop - start] = whole[start:stop]
        targets[i, reached - start : stop - start] = whole[reached + 1 : stop + 1]
        reached = stop
    return ids, targets


@dataclass(frozen=True)
class PerplexitySuite(Config, Suite):
    """`windows`: every `length` tokens from a fresh state, as lm-evaluation-harness does it; with `stride`, windows
    follow so many tokens after each other, and all but the first count their new tokens alone. `stream`: a document
    from its first to its last token, with the state carried on. Standard errors are over stretches of `length` or
    `stride` tokens."""

    text: str = ""  # a folder or a file
    modes: Sequence[str] = ("windows", "stream")
    length: int = 2048
    stride: int | None = None  # default: length
    most_tokens: int = 200_000  # of one document

    name: ClassVar[str] = "perplexity"
    columns: ClassVar[dict[str, str]] = {
        "document": "document", "mode": "read", "tokens": "tokens", "loss": "nats a token", "stderr": "± stderr",
        "perplexity": "ppl",
        "word_perplexity": "ppl a word", "bits_per_byte": "bits a byte",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length", "most_tokens", *(() if self.stride is None else ("stride",)))
        require(
            self.stride is None or self.stride <= self.length,
            f"perplexity.stride is at most length={self.length}, or tokens are left out; got {self.stride}",
        )
        require(bool(self.modes), "perplexity.modes is a list of some of 'windows' and 'stream', got none")
        for mode in self.modes:
            require(mode in ("windows", "stream"), f"modes are 'windows' and 'stream', got {mode!r}")
        require(bool(self.text), "give perplexity.text, a folder or a file of text")

    def files(self) -> list[Path]:
        return text_files(self.text)

    def cells(self) -> list[Cell]:
        return [{"document": name, "mode": mode} for name in documents(self.text) for mode in self.modes]

    def open(self, subject: Subject) -> Measure:
        words, texts = subject.words(), documents(self.text)
        for name, text in texts.items():
            begin = encode_document(words, name, text[:1000])
            require(bool(begin), f"{name}: the tokenizer makes no tokens of its first characters; leave it out")

        def measure(cell: Cell) -> Result:
            text = texts[cell["document"]]
            whole = encode_document(words, cell["document"], text)
            tokens = whole[: self.most_tokens]
            share = 1.0 if len(tokens) == len(whole) else len(words.decode(tokens)) / len(words.decode(whole))
            streams = cell["mode"] == "stream"
            length = len(tokens) if streams else self.length
            ids, targets = windows(tokens, words.end, length, None if streams else self.stride)
            chances = []
            for part in torch.arange(len(ids)).split(max(1, subject.piece // length)):
                chances.append(subject.read(ids[part], targets[part])[0])
            losses, asked = -torch.cat(chances), targets != IGNORED
            total = losses.sum(dtype=torch.float64).item()
            count = {"words": len(re.split(r"\s+", text)) * share, "bytes": len(text.encode()) * share}
            return {
                "tokens": len(tokens), "loss": total / len(tokens),
                "stderr": spread_of(losses[asked], self.stride or self.length),
                "perplexity": perplexity_of(total / len(tokens)),
                "word_perplexity": perplexity_of(total / count["words"]),
                "bits_per_byte": total / count["bytes"] / math.log(2),
                "by_position": by_position(losses, asked),
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
