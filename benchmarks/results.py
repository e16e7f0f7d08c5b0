"""Write docs/results.md and its pictures from the runs in the folders of benchmarks/results. The page is never edited.

    python benchmarks/results.py            # make results

What people have to say about the numbers stands in benchmarks/results/commentary.md: `## EXPERIMENT` goes before an
experiment's tables, what follows `### Seen` there goes after them, what precedes the first section opens the page, and
`## What did not reproduce` ends it.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from titanmem import recipes
from titanmem.bench import gue, language
from titanmem.bench.record import RunRecord, ordered
from titanmem.bench.search import RATE
from titanmem.bench.speed import PEERS, SCORE
from titanmem.bench.tasks import ORDER, TaskTable
from titanmem.forecast import experiment
from titanmem.reproduce import open_experiment

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
IMAGES = PAGE.parent / "images"
LONGEST = 60  # characters of a setting in a table
MOST_LINES = 14  # of a picture in which they can be told apart
SEEN = "### Seen"
LAST = "What did not reproduce"


def read_commentary(text: str) -> dict[str, str]:
    """The texts by section; the opening one is called ""."""
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {"": parts[0].strip(), **{name.strip(): body.strip() for name, body in pairs}}


def span(values: Sequence[int]) -> str:
    """From the lowest to the highest; 0 is unknown."""
    low, high = min(values), max(values)
    if high == 0:
        return "–"
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class Experiment(ABC):
    """All runs of one experiment."""

    caption: str
    order: Sequence[str]  # of the models

    def __init__(self, name: str, runs: Sequence[RunRecord]) -> None:
        self.name = name
        self.models = {
            model: sorted((run for run in runs if run.variant == model), key=lambda run: run.seed)
            for model in ordered((run.variant for run in runs), self.order)
        }

    @property
    def runs(self) -> list[RunRecord]:
        return [run for runs in self.models.values() for run in runs]

    @property
    def picture(self) -> Path:
        return IMAGES / f"results-{self.name}.png"

    @property
    def pictured(self) -> bool:
        """Whether there is enough for a picture."""
        return True

    def pictures(self) -> dict[Path, Callable[[], Any]]:
        """Where they lie, and what draws them."""
        return {self.picture: self.figure} if self.pictured else {}

    @abstractmethod
    def scores(self) -> list[str]:
        """The table, and what its numbers are."""

    @abstractmethod
    def commands(self) -> list[str]:
        """What repeats all runs."""

    @abstractmethod
    def figure(self) -> Any: ...

    def costs(self) -> list[str]:
        """The table of what every model took."""
        lines = ["| model | parameters | steps | tokens | seeds | minutes a run | on | settings |", "|" + "---|" * 8]
        for model, runs in self.models.items():
            devices = {f"{run.machine['device']}{f', {run.beside} at once' if run.beside > 1 else ''}" for run in runs}
            values: dict[str, set[str]] = {}
            for run in runs:
                for name, value in run.settings.items():
                    values.setdefault(name, set()).add(json.dumps(value))
            settings = ", ".join(f"`{name}={shown(sorted(found))}`" for name, found in values.items())
            tokens = "" if runs[0].tokens is None else f"{runs[0].tokens / 1e6:.1f} M"
            skipped = [int(run.metrics.get("skipped", 0)) for run in runs]
            left_out = f" ({span(skipped)} skipped)" if any(skipped) else ""
            sizes = (
                f"{span([run.parameters for run in runs])} | {span([run.steps for run in runs])}{left_out} | {tokens}"
            )
            lines.append(
                f"| {model} | {sizes} | "
                f"{seeds_of(runs).replace(',', ', ')} | {statistics.mean(run.minutes for run in runs):.1f} | "
                f"{'; '.join(sorted(devices))} | {settings or 'the recipe’s'} |"
            )
        return lines

    def section(self, text: str) -> list[str]:
        """Its part of the page."""
        before, _, after = text.partition(SEEN)
        return [
            f"## {self.name}", "",
            *([before.strip(), ""] if before.strip() else []),
            *self.scores(), "",
            *(line for file in self.pictures() for line in (f"![{self.caption}: {self.name}](images/{file.name})", "")),
            *([after.strip(), ""] if after.strip() else []),
            *self.costs(), "",
            "```", *self.commands(), "```", "",
        ]  # fmt: skip


def shown(values: list[str]) -> str:
    """What a setting was; long ones stand in the command below the table."""
    text = " or ".join(values)
    return text if len(text) <= LONGEST else "…"


def seeds_of(runs: Sequence[RunRecord]) -> str:
    return ",".join(str(seed) for seed in sorted({run.seed for run in runs}))


def setting_words(run: RunRecord, leave: Sequence[str] = ()) -> list[str]:
    """The settings of a run as they were given."""
    return [f"{name}={json.dumps(value)}" for name, value in run.settings.items() if name not in leave]


def other(option: str, found: set[Any], usual: Collection[Any]) -> list[str]:
    """An option that is needed where not all of the usual things were run, or more."""
    return [] if found == set(usual) else [option, ",".join(map(str, sorted(found)))]


class Task(Experiment):
    """Rows are models, columns levels."""

    caption = "Accuracy by length and training loss"
    order = ORDER

    def scores(self) -> list[str]:
        return TaskTable(self.runs).lines()

    def commands(self) -> list[str]:
        """One command for every set of settings and seeds."""
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            words = ["--seeds", seeds_of(runs), *(["--label", runs[0].label] if runs[0].label else [])]
            groups.setdefault(shlex.join([*words, *setting_words(runs[0])]), []).append(f"{runs[0].model}-{self.name}")
        return [f"python benchmarks/tasks.py {' '.join(names)} {rest}" for rest, names in groups.items()]

    def figure(self) -> Any:
        return TaskTable(self.runs).figure()


class Babilong(Task):
    """Needs its stories and a text beside."""

    def commands(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            words = ["--data", str(runs[0].settings["data"]), "--facts", "BABI_FOLDER", "--seeds", seeds_of(runs)]
            words += other("--questions", {entry["level"]["qa"] for run in runs for entry in run.levels}, [1])
            words += ["--label", runs[0].label] if runs[0].label else []
            words += setting_words(runs[0], ["data", *([] if runs[0].label else ["task.stages"])])
            groups.setdefault(shlex.join(words), []).append(runs[0].model)
        return [f"titanmem reproduce babilong --models {','.join(names)} {rest}" for rest, names in groups.items()]


class Forecast(Experiment):
    """Rows are data sets and horizons, columns models."""

    caption = "Mean squared error, ours and published"
    order = experiment.MODELS

    @property
    def pictured(self) -> bool:
        return any(horizon == experiment.AVERAGE for _, _, horizon in experiment.cells(self.runs))

    def scores(self) -> list[str]:
        return [experiment.table_3(self.runs), "", "MSE / MAE over all test windows; ± is the deviation over seeds."]

    def commands(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            levels = [entry["level"] for run in runs for entry in run.levels]
            words = other("--datasets", {level["dataset"] for level in levels}, experiment.DATASETS)
            words += other("--horizons", {level["horizon"] for level in levels}, experiment.HORIZONS)
            words += ["--label", runs[0].label] if runs[0].label else []
            words += setting_words(runs[0])
            seeds = seeds_of(runs).replace(",", "+")
            groups.setdefault(shlex.join(words), []).append(f"{runs[0].model}:{seeds}")
        start = "titanmem reproduce forecasting --data FOLDER --models"
        return [f"{start} {','.join(models)} {rest}".rstrip() for rest, models in groups.items()]

    def figure(self) -> Any:
        return experiment.figure(self.runs)


class Dna(Experiment):
    """Rows are tasks, columns models."""

    caption = "Matthews correlation by task and model"
    order = gue.MODELS

    def scores(self) -> list[str]:
        return [gue.table(gue.chosen(self.runs)), "", "± is the deviation over seeds."]

    def commands(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            words = other("--tasks", {entry["level"]["task"] for run in runs for entry in run.levels}, gue.TASKS)
            words += other("--rates", {run.settings[RATE] for run in runs}, gue.RATES)
            words += other("--seeds", {run.seed for run in runs}, gue.SEEDS)
            words += ["--label", runs[0].label] if runs[0].label else []
            words += setting_words(runs[0], [RATE])
            groups.setdefault(shlex.join(words), []).append(runs[0].model)
        start = "titanmem reproduce dna --data GUE_FOLDER --models"
        return [f"{start} {','.join(models)} {rest}".rstrip() for rest, models in groups.items()]

    def figure(self) -> Any:
        return gue.figure(gue.chosen(self.runs))


def levels_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The levels of some runs, each once."""
    return list({json.dumps(e["level"]): e["level"] for run in runs for e in run.levels}.values())


class Text(Experiment):
    """Language models; their tables are those of `titanmem reproduce`."""

    captions: ClassVar[dict[str, str]] = {
        "language": "Held-out loss by position and training loss",
        "depth": "Held-out loss by position and tokens per second",
        "ablation": "Held-out loss without each part",
        "throughput": "Tokens per second by length",
    }
    order = (*language.ORDER, *PEERS)

    def __init__(self, name: str, runs: Sequence[RunRecord]) -> None:
        self.every, self.caption = runs, self.captions[name]
        self.made = open_experiment(name)
        trained = [run for run in runs if run.score == "loss"]
        super().__init__(name, runs if name == "throughput" else trained)

    def scores(self) -> list[str]:
        return [self.made.table(self.every)]

    def commands(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            own = {name: runs[0].settings[name] for name in language.OWN if name in runs[0].settings}
            own.pop("scale", None)
            words = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            if self.name != "throughput":
                words += ["--rates", ",".join(f"{rate:g}" for rate in sorted({run.settings[RATE] for run in runs}))]
                words += ["--seeds", seeds_of(runs)]
            timed = [run for run in self.every if run.variant == runs[0].variant and run.score == SCORE]
            if timed:
                words += ["--shapes", ",".join(f"{level['rows']}x{level['length']}" for level in levels_of(timed))]
            label = runs[0].label.removeprefix(str(own.get("size", ""))).removeprefix("-")  # a size is one of its own
            words += ["--label", label] if label else []
            words += setting_words(runs[0], [RATE, *language.OWN])
            groups.setdefault(shlex.join(words), []).append(runs[0].model)
        start = f"titanmem reproduce {self.name} --models"
        return [f"{start} {','.join(models)} {rest}".rstrip() for rest, models in groups.items()]

    def figure(self) -> Any:
        return self.made.figure(self.every)

    def pictures(self) -> dict[Path, Callable[[], Any]]:
        """Where there are too many models for one, those with other settings have their own."""
        if len(self.models) <= MOST_LINES:
            return super().pictures()
        plain, others = ([run for run in self.every if bool(run.label) == labelled] for labelled in (False, True))
        others_in = self.picture.with_stem(f"{self.picture.stem}-others")
        return {self.picture: lambda: self.made.figure(plain), others_in: lambda: self.made.figure(others)}


def experiments(folder: Path = STORED) -> list[Experiment]:
    """The experiments of which runs are stored."""
    runs = RunRecord.all_in(folder / "tasks")
    names = ordered((run.experiment for run in runs), list(recipes.TASKS))
    found: list[Experiment] = [
        (Babilong if name == "babilong" else Task)(name, [run for run in runs if run.experiment == name])
        for name in names
    ]
    kinds: dict[str, type[Experiment]] = {**dict.fromkeys(Text.captions, Text), "forecast": Forecast, "dna": Dna}
    for name, kind in kinds.items():
        runs = RunRecord.all_in(folder / name)
        found += [kind(name, runs)] if runs else []
    return found


def page(found: Sequence[Experiment], commentary: str) -> str:
    """The whole page."""
    texts = read_commentary(commentary)
    lines = ["<!-- made by benchmarks/results.py from benchmarks/results; do not edit -->", "# Results", ""]
    lines += [texts[""], ""]
    if not found:
        lines += ["No run is stored yet.", ""]
    for each in found:
        lines += each.section(texts.get(each.name, ""))
    if LAST in texts:
        lines += [f"## {LAST}", "", texts[LAST], ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    found = experiments()
    PAGE.write_text(page(found, (STORED / "commentary.md").read_text()))
    drawn = {file: figure for each in found for file, figure in each.pictures().items()}
    for file, figure in drawn.items():
        figure().savefig(file)
    for old in set(IMAGES.glob("results-*.png")) - drawn.keys():
        old.unlink()
    print(f"{PAGE}: {len(found)} experiments, {sum(len(each.runs) for each in found)} runs")


if __name__ == "__main__":
    main()
