"""Does the memory do the work? The same text read with a fresh, a warm frozen and a warm learning memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from titanmem.config import Config, check_counts, check_types, require
from titanmem.eval.perplexity import documents, encode_document, text_files
from titanmem.eval.subject import Subject
from titanmem.eval.suite import Cell, Measure, Result, Suite
from titanmem.train.evaluate import memory_work
from titanmem.train.plots import new_figure, position_axis


@dataclass(frozen=True)
class MemorySuite(Config, Suite):
    """Loss on the second half of the first `length` tokens of every document; all must be that long. `window`: the
    fresh reading forgets everything after so many tokens; give the model's window or segment. Standard errors are over
    stretches of `window` tokens; `gain` is frozen less learning, token by token, so its error is smaller. The fourth
    number, attention alone, is this suite on the baseline `window`."""

    text: str = ""
    length: int = 4096
    window: int = 64

    name: ClassVar[str] = "memory"
    columns: ClassVar[dict[str, str]] = {
        "document": "document", "fresh": "fresh", "fresh_stderr": "± stderr", "frozen": "warm, frozen",
        "frozen_stderr": "± stderr", "learning": "warm, learning", "learning_stderr": "± stderr", "gain": "gain",
        "gain_stderr": "± stderr",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length", "window")
        require(bool(self.text), "give memory.text, a folder or a file of text")
        require(self.length >= 4 * self.window, f"length {self.length} must be at least 4 windows of {self.window}")

    def files(self) -> list[Path]:
        return text_files(self.text)

    def cells(self) -> list[Cell]:
        return [{"document": name} for name in documents(self.text)]

    def open(self, subject: Subject) -> Measure:
        words = subject.words()
        texts = {name: encode_document(words, name, text) for name, text in documents(self.text).items()}
        short = [name for name, tokens in texts.items() if len(tokens) <= self.length]
        if short:
            raise ValueError(self._too_short(short, sorted(len(tokens) for tokens in texts.values())))

        def measure(cell: Cell) -> Result:
            tokens = torch.tensor([texts[cell["document"]][: self.length + 1]], device=subject.device)
            rows = {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}
            return memory_work(subject.model, rows, min(subject.piece, self.length // 2), self.window)

        return measure

    def _too_short(self, short: list[str], sizes: list[int]) -> str:
        """What is said where some documents are too short; `sizes` are the tokens of all, ascending."""
        most, least = sizes[0] - 1, 4 * self.window
        lower = f", or memory.length={most} or less" if most >= least else f" (at least {least + 1} tokens)"
        return (
            f"{len(short)} of {len(sizes)} documents have no more than memory.length={self.length} tokens "
            f"({', '.join(short[:3])}): the longest has {sizes[-1]}, the shortest {sizes[0]}; give longer ones{lower}"
        )

    def figure(self, results: list[Result]) -> Any:
        figure, (left, right) = new_figure(2)
        kinds = ("fresh", "frozen", "learning")
        for result in results[:8]:
            errors = [result.get(f"{kind}_stderr") or 0 for kind in kinds]
            left.errorbar(
                kinds, [result[kind] for kind in kinds], errors, marker="o", capsize=2, label=result["document"]
            )
            places = result["by_position"]
            right.plot([(p["from"] + p["to"]) / 2 for p in places], [p["loss"] for p in places], marker="o", ms=3)
        position_axis(right, results[0]["by_position"])
        left.set(ylabel="loss, nats a token", title="second half of the documents")
        right.set(xlabel="position", title="learning, by position")
        left.legend(frameon=False, fontsize=7)
        return figure
