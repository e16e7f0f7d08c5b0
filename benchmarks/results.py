"""Write docs/results.md and its pictures from the runs in benchmarks/results/tasks. The page is never edited.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from titanmem import recipes
from titanmem.eval.runs import RunRecord
from titanmem.train.plots import new_figure

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "results" / "tasks"
COMMENTARY = ROOT / "benchmarks" / "results" / "commentary.md"
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


def ordered(names: set[str], first: Sequence[str]) -> list[str]:
    """Known names in their own order, the others behind, variants such as lmm+chunk16 behind their model."""

    def place(name: str) -> tuple[int, str]:
        head = name.split("+")[0]
        return (first.index(head) if head in first else len(first), name)

    return sorted(names, key=place)


class Experiment:
    """All runs of one experiment: rows are models, columns levels."""

    def __init__(self, name: str, runs: Sequence[RunRecord]) -> None:
        self.name = name
        self.models = {
            model: sorted((run for run in runs if run.model == model), key=lambda run: run.seed)
            for model in ordered({run.model for run in runs}, recipes.MODELS)
        }
        found = {json.dumps(entry["level"], sort_keys=True): entry["level"] for run in runs for entry in run.levels}
        self.levels: list[Level] = sorted(found.values(), key=lambda level: tuple(map(str_last, level.values())))
        self.keys = list(dict.fromkeys(key for level in self.levels for key in level))

    @property
    def runs(self) -> list[RunRecord]:
        return [run for runs in self.models.values() for run in runs]

    @property
    def picture(self) -> Path:
        return IMAGES / f"results-{self.name}.png"

    def entries(self, model: str, level: Level) -> list[dict[str, Any]]:
        """What every seed of a model found at a level."""
        return [entry for run in self.models[model] for entry in run.levels if entry["level"] == level]

    def score(self, model: str, level: Level) -> tuple[float, float | None] | None:
        """Mean and deviation over seeds; no deviation of a single one, None where nothing was measured."""
        found = [entry[self.models[model][0].score] for entry in self.entries(model, level)]
        if not found:
            return None
        return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else None

    def title(self, level: Level) -> str:
        values = [level.get(key, "–") for key in self.keys]
        return " / ".join(value if isinstance(value, str) else f"{value:,}" for value in values)

    def scores(self) -> list[str]:
        """The table of accuracies in per cent, the best of a column in bold."""
        lines = [f"| {' / '.join(self.keys)} | " + " | ".join(map(self.title, self.levels)) + " |"]
        lines.append("|---|" + "---|" * len(self.levels))
        best = {}
        for column, level in enumerate(self.levels):
            means = [found[0] for model in self.models if (found := self.score(model, level)) is not None]
            best[column] = max(means)
        for model in self.models:
            cells = []
            for column, level in enumerate(self.levels):
                found = self.score(model, level)
                if found is None:
                    cells.append("")
                    continue
                mean, deviation = found
                text = f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
                cells.append(f"**{text}**" if mean == best[column] and len(self.models) > 1 else text)
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        chances = [self.entries(m, level) for level in self.levels for m in self.models if self.entries(m, level)]
        by_level = {json.dumps(entries[0]["level"]): entries[0]["chance"] for entries in chances}
        shown = [f"{100 * by_level[json.dumps(level)]:.1f}" for level in self.levels]
        return [*lines, "| *chance* | " + " | ".join(shown) + " |"]

    def costs(self) -> list[str]:
        """The table of what every model took."""
        lines = ["| model | parameters | steps | tokens | seeds | minutes a run | on | settings |", "|" + "---|" * 8]
        for model, runs in self.models.items():
            first = runs[0]
            devices = {f"{run.machine['device']}{f', {run.beside} at once' if run.beside > 1 else ''}" for run in runs}
            settings = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in first.settings.items())
            minutes = statistics.mean(run.minutes for run in runs)
            seeds = ", ".join(str(run.seed) for run in runs)
            lines.append(
                f"| {model} | {first.parameters:,} | {first.steps:,} | {first.tokens / 1e6:.1f} M | {seeds} | "
                f"{minutes:.1f} | {'; '.join(sorted(devices))} | {settings or 'the recipe’s'} |"
            )
        return lines

    def commands(self) -> list[str]:
        """What repeats all runs: one command for every set of settings and seeds."""
        groups: dict[str, list[str]] = {}
        for model, runs in self.models.items():
            label = model.partition("+")[2]
            words = ["--seeds", ",".join(str(run.seed) for run in runs)] + (["--label", label] if label else [])
            words += [f"{name}={json.dumps(value)}" for name, value in runs[0].settings.items()]
            groups.setdefault(shlex.join(words), []).append(runs[0].recipe)
        return [f"python benchmarks/tasks.py {' '.join(names)} {rest}" for rest, names in groups.items()]

    def figure(self) -> Any:
        """Accuracy against length, and training loss against steps (one seed)."""
        figure, (left, right) = new_figure(2, width=5.2, height=4.4)
        styles = ("-", "--", ":", "-.")
        for index, (model, runs) in enumerate(self.models.items()):
            look = {"color": f"C{index % 10}", "linestyle": styles[index // 10 % 4]}
            found = [(level["length"], self.score(model, level)) for level in self.levels if "length" in level]
            points = [(length, *score) for length, score in found if score is not None]
            if points:
                lengths, means, errors = zip(*points, strict=True)
                bars = [error or 0 for error in errors]
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

    def section(self, text: str) -> list[str]:
        """Its part of the page."""
        before, _, after = text.partition(SEEN)
        error = max(entry["stderr"] for run in self.runs for entry in run.levels)
        rows = sorted({entry["rows"] for run in self.runs for entry in run.levels})
        return [
            f"## {self.name}", "",
            *([before.strip(), ""] if before.strip() else []),
            *self.scores(), "",
            f"{MEANS[self.runs[0].score]} in per cent, {' or '.join(map(str, rows))} rows a level; ± is the deviation "
            f"over seeds. The largest standard error of one test is {100 * error:.1f}.", "",
            f"![Accuracy by length and training loss: {self.name}](images/{self.picture.name})", "",
            *([after.strip(), ""] if after.strip() else []),
            *self.costs(), "",
            "```", *self.commands(), "```", "",
        ]  # fmt: skip


def str_last(value: Any) -> tuple[bool, Any]:
    """Sorts numbers before texts."""
    return isinstance(value, str), value


def experiments(folder: Path = RUNS) -> list[Experiment]:
    """The experiments of which runs are stored."""
    runs = RunRecord.all_in(folder)
    names = ordered({run.experiment for run in runs}, list(recipes.TASKS))
    return [Experiment(name, [run for run in runs if run.experiment == name]) for name in names]


def page(found: Sequence[Experiment], commentary: str) -> str:
    """The whole page."""
    texts = read_commentary(commentary)
    lines = ["<!-- made by benchmarks/results.py from benchmarks/results/tasks; do not edit -->", "# Results", ""]
    lines += [texts[""], ""]
    if not found:
        lines += ["No run is stored yet.", ""]
    for experiment in found:
        lines += experiment.section(texts.get(experiment.name, ""))
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    found = experiments()
    PAGE.write_text(page(found, COMMENTARY.read_text()))
    for experiment in found:
        experiment.figure().savefig(experiment.picture)
    for old in set(IMAGES.glob("results-*.png")) - {experiment.picture for experiment in found}:
        old.unlink()
    print(f"{PAGE}: {len(found)} experiments, {sum(len(experiment.runs) for experiment in found)} runs")


if __name__ == "__main__":
    main()
