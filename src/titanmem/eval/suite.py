"""A suite is a list of cells and what is measured in each; running it writes every cell down at once, so that an
interrupted evaluation goes on where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from tqdm import tqdm

from titanmem.bench.report import table
from titanmem.bench.timing import machine
from titanmem.config import Config
from titanmem.data.shards import naming, writing
from titanmem.eval.subject import Subject
from titanmem.train.plots import can_draw, new_figure

Cell = dict[str, Any]
Result = dict[str, Any]
Measure = Callable[[Cell], Result]


class Suite(ABC):
    """Subclasses are frozen dataclasses of settings."""

    name: ClassVar[str]
    columns: ClassVar[dict[str, str]]  # of the table: key of a result, title

    def fitted(self, subject: Subject) -> Self:
        """The suite for this subject: what was left open is as in the run's own task."""
        return self

    def files(self) -> list[Path]:
        """The texts that are read."""
        return []

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
    """Mean, its standard error (None for one value) and the count."""
    found = list(values)
    n = len(found)
    middle = sum(found) / n
    spread = sum((x - middle) ** 2 for x in found)
    return {"score": middle, "stderr": (spread / (n - 1) / n) ** 0.5 if n > 1 else None, "n": n}


def perplexity_of(loss: float) -> float:
    """exp(loss); not a number stays one, and what is beyond all numbers is infinite."""
    return loss if math.isnan(loss) else math.exp(loss) if loss < 700 else math.inf


def bars(results: Sequence[Result], name: str) -> Any | None:
    """A picture of accuracies, one bar for every `name`; None where there are none."""
    scored = [result for result in results if "score" in result]
    if not scored:
        return None
    figure, (axis,) = new_figure(1, width=6)
    places = range(len(scored))
    errors = [result.get("stderr") or 0 for result in scored]
    axis.barh(places, [result["score"] for result in scored], xerr=errors, height=0.6, capsize=2)
    axis.set_yticks(places, [result[name] for result in scored])
    axis.invert_yaxis()
    axis.set(xlim=(0, 1), xlabel="accuracy")
    return figure


def weights_of(folder: str) -> list[Path]:
    """What a model is made of; a model without a folder has no files."""
    kinds = ("*.safetensors", "checkpoints/step-*/*.json", "config.json", "tokenizer*")
    return [file for kind in kinds for file in Path(folder).glob(kind)] if folder else []


def fingerprint(files: Iterable[Path]) -> str:
    """Of names and contents, so that results of other weights or texts are not mixed in."""
    digest = hashlib.sha256()
    found = sorted(file for file in files if file.is_file())
    for file in found:
        digest.update(file.name.encode())
        with file.open("rb") as data:
            while block := data.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:16] if found else ""


def run_suite(subject: Subject, suite: Suite, folder: Path, measure: Measure | None = None) -> dict[str, Any]:
    """Measure what is not measured yet; leaves FOLDER/SUITE.json, and SUITE.png where there is matplotlib. `measure`:
    what `suite.open` gave, if it was called already."""
    suite = suite.fitted(subject)
    measure = measure or suite.open(subject)
    about = {
        "suite": suite.name, "model": subject.name, "weights": fingerprint(weights_of(subject.name)),
        "texts": fingerprint(suite.files()), "settings": suite.to_dict(),
    }  # fmt: skip
    about = json.loads(json.dumps(about))
    cells = suite.cells()
    begin = time.perf_counter()
    with open_journal(folder / f"{suite.name}.jsonl", about) as (done, note):
        with tqdm(total=len(cells), desc=suite.name, unit="cell", dynamic_ncols=True) as bar:
            for cell in cells:
                key = json.dumps(cell, sort_keys=True)
                if key not in done:
                    done[key] = {**cell, **measure(cell)}
                    note({"cell": key, "result": done[key]})
                bar.update()
        results = [done[json.dumps(cell, sort_keys=True)] for cell in cells]
        found = {**about, "machine": machine(), "seconds": time.perf_counter() - begin, "results": results}
        with writing(folder / f"{suite.name}.json") as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
        figure = suite.figure(results) if can_draw() else None
        if figure is not None:
            figure.savefig(folder / f"{suite.name}.png")
    print(table(results, suite.columns))
    return found


@contextmanager
def open_journal(path: Path, about: Mapping[str, Any]) -> Iterator[tuple[dict[str, Result], Callable[[Any], None]]]:
    """The cells that an earlier run of the same suite on the same weights measured, and what writes one down. Nobody
    else writes to the journal meanwhile; lines that a killed run left unfinished do not count."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is measuring into {path}; wait for it, or give another --out") from error

        def note(held: Any) -> None:
            with naming(path):
                file.write(json.dumps(held).encode() + b"\n")
                file.flush()

        file.seek(0)
        written = file.read()
        whole: list[Any] = []
        for line in written.splitlines():
            with suppress(ValueError):
                whole.append(json.loads(line))
        if not whole:
            file.truncate(0)
            note(about)
        elif whole[0] != about:
            differ = [name for name in about if whole[0].get(name) != about[name]]
            raise ValueError(
                f"{path} belongs to another evaluation (other {', '.join(differ)}); give another --out, or delete it"
            )
        elif not written.endswith(b"\n"):
            file.write(b"\n")
        yield {line["cell"]: line["result"] for line in whole[1:]}, note
