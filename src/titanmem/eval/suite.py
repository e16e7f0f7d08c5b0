"""A suite is a list of cells and what is measured in each; running it writes every cell down at once, so that an
interrupted evaluation goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from titanmem.bench.report import table
from titanmem.bench.timing import machine
from titanmem.config import Config
from titanmem.eval.subject import Subject

Cell = dict[str, Any]
Result = dict[str, Any]
Measure = Callable[[Cell], Result]


class Suite(ABC):
    """Subclasses are frozen dataclasses of settings."""

    name: ClassVar[str]
    columns: ClassVar[dict[str, str]]  # of the table: key of a result, title

    @abstractmethod
    def cells(self) -> list[Cell]:
        """What is measured, in order."""

    @abstractmethod
    def open(self, subject: Subject) -> Measure:
        """Read and check everything that can be wrong before the first cell; returns what measures one: `score` with
        `stderr` and `n` where there is a score."""

    def figure(self, results: list[Result]) -> Any | None:
        """A picture of all cells, if one says more than the table."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The settings."""
        assert isinstance(self, Config)
        return Config.to_dict(self)


def mean(values: Iterable[float]) -> Result:
    """Mean, its standard error and the count."""
    found = list(values)
    n = len(found)
    middle = sum(found) / n
    spread = sum((x - middle) ** 2 for x in found) / max(1, n - 1)
    return {"score": middle, "stderr": (spread / n) ** 0.5, "n": n}


def fingerprint(folder: str) -> str:
    """Which weights a folder holds, so that results of others are not mixed in; a model without a folder has none."""
    if not folder:
        return ""
    path = Path(folder)
    files = sorted([*path.glob("*.safetensors"), *path.glob("checkpoints/step-*/*.json"), *path.glob("config.json")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as data:
            while block := data.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:16]


def run_suite(subject: Subject, suite: Suite, folder: Path, measure: Measure | None = None) -> dict[str, Any]:
    """Measure what is not measured yet; leaves FOLDER/SUITE.json and SUITE.png. `measure`: what `suite.open` gave, if
    it was called already."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = fingerprint(subject.name)
    about = {"suite": suite.name, "model": subject.name, "weights": weights, "settings": suite.to_dict()}
    about = json.loads(json.dumps(about))
    journal = folder / f"{suite.name}.jsonl"
    done = read_journal(journal, about)
    measure = measure or suite.open(subject)
    cells = suite.cells()
    begin = time.perf_counter()
    with journal.open("a") as file, tqdm(total=len(cells), desc=suite.name, unit="cell", dynamic_ncols=True) as bar:
        for cell in cells:
            key = json.dumps(cell, sort_keys=True)
            if key not in done:
                done[key] = {**cell, **measure(cell)}
                file.write(json.dumps({"cell": key, "result": done[key]}) + "\n")
                file.flush()
            bar.update()
    results = [done[json.dumps(cell, sort_keys=True)] for cell in cells]
    found = {**about, "machine": machine(), "seconds": time.perf_counter() - begin, "results": results}
    (folder / f"{suite.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    figure = suite.figure(results)
    if figure is not None:
        figure.savefig(folder / f"{suite.name}.png")
    print(table(results, suite.columns))
    return found


def read_journal(path: Path, about: Mapping[str, Any]) -> dict[str, Result]:
    """Cells that an earlier run of the same suite on the same weights measured; begins a journal if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    whole: list[Any] = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a run that was killed
            break
    if not whole:
        path.write_text(json.dumps(about) + "\n")
        return {}
    if whole[0] != about:
        differ = [name for name in about if whole[0].get(name) != about[name]]
        raise ValueError(
            f"{path} belongs to another evaluation (other {', '.join(differ)}); give another --out, or delete it"
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in whole))
    return {line["cell"]: line["result"] for line in whole[1:]}
