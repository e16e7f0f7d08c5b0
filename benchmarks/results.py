"""Write docs/results.md and its pictures from the runs in benchmarks/results/{tasks,forecast,dna}. The page is never
edited.

    python benchmarks/results.py            # make results

What people have to say about the numbers stands in benchmarks/results/commentary.md: `## EXPERIMENT` goes before an
experiment's tables, what follows `### Seen` there goes after them, and what precedes the first section opens the page.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from titanmem import recipes
from titanmem.bench import gue
from titanmem.bench.record import RunRecord, mean_and_deviation, ordered
from titanmem.forecast import experiment
from titanmem.train.plots import new_figure

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
IMAGES = PAGE.parent / "images"
SEEN = "### Seen"
MEANS = {"accuracy": "Right answers", "exact": "Rows whose whole answer is right"}
Level = dict[str, Any]


def read_commentary(text: str) -> dict[str, str]:
    """The texts by section; the opening one is called ""."""
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {"": parts[0].strip(), **{name.strip(): body.strip() for name, body in pairs}}


def span(values: Sequence[int]) -> str:
    """From the lowest to the highest."""
    low, high = min(values), max(values)
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
            settings = ", ".join(f"`{name}={' or '.join(sorted(found))}`" for name, found in values.items())
            tokens = "" if runs[0].tokens is None else f"{runs[0].tokens / 1e6:.1f} M"
            sizes = f"{span([run.parameters for run in runs])} | {span([run.steps for run in runs])} | {tokens}"
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
            *([f"![{self.caption}: {self.name}](images/{self.picture.name})", ""] if self.pictured else []),
            *([after.strip(), ""] if after.strip() else []),
            *self.costs(), "",
            "```", *self.commands(), "```", "",
        ]  # fmt: skip


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
    order = recipes.MODELS

    def __init__(self, name: str, runs: Sequence[RunRecord]) -> None:
        super().__init__(name, runs)
        found = {json.dumps(entry["level"], sort_keys=True): entry["level"] for run in runs for entry in run.levels}
        self.levels: list[Level] = sorted(found.values(), key=lambda level: tuple(map(str_last, level.values())))
        self.keys = list(dict.fromkeys(key for level in self.levels for key in level))

    def entries(self, model: str, level: Level) -> list[dict[str, Any]]:
        """What every seed of a model found at a level."""
        return [entry for run in self.models[model] for entry in run.levels if entry["level"] == level]

    def found(self, model: str, level: Level) -> list[float]:
        """The score of every seed."""
        return [entry[self.models[model][0].score] for entry in self.entries(model, level)]

    def title(self, level: Level) -> str:
        values = [level.get(key, "–") for key in self.keys]
        return " / ".join(value if isinstance(value, str) else f"{value:,}" for value in values)

    def scores(self) -> list[str]:
        """Accuracies in per cent, the best of a column in bold."""
        lines = [f"| {' / '.join(self.keys)} | " + " | ".join(map(self.title, self.levels)) + " |"]
        lines.append("|---|" + "---|" * len(self.levels))
        best = [max(statistics.mean(found) for m in self.models if (found := self.found(m, x))) for x in self.levels]
        for model in self.models:
            cells = []
            for level, highest in zip(self.levels, best, strict=True):
                found = self.found(model, level)
                text = mean_and_deviation([100 * score for score in found], 1) if found else ""
                bold = found and len(self.models) > 1 and statistics.mean(found) == highest
                cells.append(f"**{text}**" if bold else text)
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        chances = [next(e for m in self.models for e in self.entries(m, level))["chance"] for level in self.levels]
        lines.append("| *chance* | " + " | ".join(f"{100 * chance:.1f}" for chance in chances) + " |")
        error = max(entry["stderr"] for run in self.runs for entry in run.levels)
        rows = sorted({entry["rows"] for run in self.runs for entry in run.levels})
        note = (
            f"{MEANS[self.runs[0].score]} in per cent, {' or '.join(map(str, rows))} rows a level; ± is the deviation "
            f"over seeds. The largest standard error of one test is {100 * error:.1f}."
        )
        return [*lines, "", note]

    def commands(self) -> list[str]:
        """One command for every set of settings and seeds."""
        groups: dict[str, list[str]] = {}
        for runs in self.models.values():
            words = ["--seeds", seeds_of(runs), *(["--label", runs[0].label] if runs[0].label else [])]
            groups.setdefault(shlex.join([*words, *setting_words(runs[0])]), []).append(f"{runs[0].model}-{self.name}")
        return [f"python benchmarks/tasks.py {' '.join(names)} {rest}" for rest, names in groups.items()]

    def figure(self) -> Any:
        """Accuracy against length, and training loss against steps (one seed)."""
        figure, (left, right) = new_figure(2, width=5.2, height=4.4)
        styles = ("-", "--", ":", "-.")
        for index, (model, runs) in enumerate(self.models.items()):
            look = {"color": f"C{index % 10}", "linestyle": styles[index // 10 % 4]}
            found = [(level["length"], self.found(model, level)) for level in self.levels if "length" in level]
            points = [(length, scores) for length, scores in found if scores]
            if points:
                lengths, means = zip(*((length, statistics.mean(scores)) for length, scores in points), strict=True)
                bars = [statistics.stdev(scores) if len(scores) > 1 else 0 for _, scores in points]
                left.errorbar(lengths, means, bars, marker="o", markersize=3, capsize=2, lw=1.2, label=model, **look)
            if runs[0].curve:
                right.plot(*zip(*runs[0].curve, strict=True), lw=1, **look)
        chances = [entry["chance"] for run in self.runs for entry in run.levels]
        left.axhline(min(chances), color="0.6", lw=1, label="chance")
        ticks = sorted({level["length"] for level in self.levels if "length" in level})
        left.set(xscale="log", ylim=(-0.02, 1.03), xlabel="length of the row", ylabel="accuracy", title=self.name)
        left.set_xticks(ticks, [f"{length:,}" for length in ticks])
        left.minorticks_off()
        right.set(xlabel="step", yscale="log", title="training loss")
        figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)
        return figure


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
            words += ["--set", *setting_words(runs[0])] if runs[0].settings else []
            groups.setdefault(shlex.join(words), []).append(f"{runs[0].model}:{seeds_of(runs)}")
        start = "python benchmarks/forecast.py --data FOLDER --plan"
        return [f"{start} {' '.join(plan)} {rest}".rstrip() for rest, plan in groups.items()]

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
            words += other("--rates", {run.settings["optim.lr"] for run in runs}, gue.RATES)
            words += other("--seeds", {run.seed for run in runs}, gue.SEEDS)
            words += ["--label", runs[0].label] if runs[0].label else []
            words += setting_words(runs[0], ["optim.lr"])
            groups.setdefault(shlex.join(words), []).append(runs[0].model)
        start = "python benchmarks/dna.py GUE_FOLDER --models"
        return [f"{start} {','.join(models)} {rest}".rstrip() for rest, models in groups.items()]

    def figure(self) -> Any:
        return gue.figure(gue.chosen(self.runs))


def str_last(value: Any) -> tuple[bool, Any]:
    """Sorts numbers before texts."""
    return isinstance(value, str), value


def experiments(folder: Path = STORED) -> list[Experiment]:
    """The experiments of which runs are stored."""
    runs = RunRecord.all_in(folder / "tasks")
    names = ordered((run.experiment for run in runs), list(recipes.TASKS))
    found: list[Experiment] = [Task(name, [run for run in runs if run.experiment == name]) for name in names]
    for name, kind in (("forecast", Forecast), ("dna", Dna)):
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
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    found = experiments()
    PAGE.write_text(page(found, (STORED / "commentary.md").read_text()))
    drawn = [each for each in found if each.pictured]
    for each in drawn:
        each.figure().savefig(each.picture)
    for old in set(IMAGES.glob("results-*.png")) - {each.picture for each in drawn}:
        old.unlink()
    print(f"{PAGE}: {len(found)} experiments, {sum(len(each.runs) for each in found)} runs")


if __name__ == "__main__":
    main()
