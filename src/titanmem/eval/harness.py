"""lm-evaluation-harness as a suite: its tasks on local files, its prompts, its scores (Titans, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titanmem.config import Config, check_counts, check_types, require
from titanmem.data.packages import load_package
from titanmem.eval.subject import Subject
from titanmem.eval.suite import Cell, Measure, Result, Suite, bars
from titanmem.models.language import TitansLM


@dataclass(frozen=True)
class HarnessSuite(Config, Suite):
    """`data` holds the data sets as local files; `tasks` are the harness's names, by default all that are there."""

    data: str = ""
    tasks: Sequence[str] = ()
    shots: int | None = None  # solved examples first; None: as the task says
    most: int | None = None  # questions of a task
    length: int = 2048  # where the harness cuts a text

    name: ClassVar[str] = "harness"
    columns: ClassVar[dict[str, str]] = {
        "task": "task", "score": "acc", "stderr": "± stderr", "acc_norm": "acc_norm", "perplexity": "ppl",
        "word_perplexity": "ppl a word", "bits_per_byte": "bits a byte", "n": "questions",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length", *(() if self.most is None else ("most",)))
        require(self.shots is None or self.shots >= 0, f"harness.shots is a number of examples, got {self.shots}")
        require(bool(self.data), "give harness.data, a folder with piqa_val.jsonl, wiki.test.raw, …")

    def files(self) -> list[Path]:
        from titanmem.hf.harness import find_data

        found = find_data(Path(self.data))
        return [found[name] for name in self.tasks or found]

    def cells(self) -> list[Cell]:
        from titanmem.hf.harness import find_data

        return [{"task": name} for name in self.tasks or find_data(Path(self.data))]

    def open(self, subject: Subject) -> Measure:
        load_package("lm_eval", "the suite harness", "eval")
        from titanmem.hf.harness import Harness

        words = subject.words()
        require(isinstance(subject.model, TitansLM), "the suite harness needs a TitansLM")
        harness = Harness(subject.model, words, Path(self.data), self.tasks, self.length, subject.piece)
        for cell in self.cells():
            harness.check(cell["task"], self.most)

        def measure(cell: Cell) -> Result:
            found, count = harness.measure(cell["task"], self.shots, self.most)
            named = {"acc": "score", "acc_stderr": "stderr"}
            return {**{named.get(name, name): value for name, value in found.items()}, "n": count}

        return measure

    def figure(self, results: list[Result]) -> Any | None:
        return bars(results, "task")
