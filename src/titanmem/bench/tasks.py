"""Runs of task recipes, MODEL-TASK: every level of the task tested after the last step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanmem import recipes
from titanmem.bench.job import TrainingJob
from titanmem.bench.record import RunRecord, mean_and_deviation, ordered
from titanmem.config import require
from titanmem.tasks import TEXT_TASKS
from titanmem.train.config import RunConfig, TrainConfig
from titanmem.train.data import fit_to_data, make_task
from titanmem.train.metrics import FILE, read_metrics

MEANS = {"accuracy": "Right answers", "exact": "Rows whose whole answer is right"}
ORDER = (*recipes.MODELS, *recipes.FLA_MODELS)  # of rows
Level = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskJob(TrainingJob):
    """A model on a task."""

    task: str

    @property
    def experiment(self) -> str:
        return self.task

    @property
    def recipe(self) -> str:
        return f"{self.model}-{self.task}"

    @property
    def name(self) -> str:
        return f"{self.recipe}{f'+{self.label}' if self.label else ''}-{self.seed}"

    def config(self) -> TrainConfig:
        settings = {**self.settings, "seed": self.seed}
        return fit_to_data(recipes.recipe(self.recipe).change(settings), settings)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        """The tests after the last step, which the run has made."""
        assert isinstance(config, TrainConfig)
        assert config.task is not None
        lines = read_metrics(self.folder / FILE)
        tests = [line["tests"] for line in lines if "tests" in line and line["step"] == config.steps]
        require(bool(tests), f"{self.folder} was not tested after its last step, {config.steps}; it is not finished")
        task, rows = make_task(config), config.task.test_rows
        score = "exact" if config.task.name in TEXT_TASKS else "accuracy"  # a number is right as a whole
        levels = []
        for level, scores in zip(config.task.tests, tests[-1], strict=True):
            numbers = {name: scores[name] for name in ("accuracy", "exact", "loss", "stderr")}
            levels.append({"level": level, **numbers, "chance": task.chance(level), "rows": rows})
        metrics = {"held_out": found["held_out"]}
        return {"levels": join_depths(levels, score), "score": score, "metrics": metrics, "tokens": config.tokens}

    def brief(self, record: RunRecord) -> str:
        found = ", ".join(f"{entry['level']['length']}: {entry[record.score]:.3f}" for entry in record.levels)
        return f"{record.minutes:.1f} minutes, {record.score} by length {found}"


def join_depths(levels: Sequence[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Levels that differ in the needle's depth alone become one, with [depth, score] of each as "depths"."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in levels:
        level = {name: value for name, value in entry["level"].items() if name != "depth"}
        groups.setdefault(json.dumps(level), []).append(entry)
    joined = []
    for name, group in groups.items():
        one: dict[str, Any] = {"level": json.loads(name)}
        one |= {key: statistics.mean(entry[key] for entry in group) for key in ("accuracy", "exact", "loss")}
        one |= {"chance": group[0]["chance"], "rows": sum(entry["rows"] for entry in group)}
        one["stderr"] = sum(entry["stderr"] ** 2 for entry in group) ** 0.5 / len(group)
        if score == "exact":
            one["stderr"] = (one["exact"] * (1 - one["exact"]) / max(1, one["rows"] - 1)) ** 0.5
        depths = [[entry["level"]["depth"], entry[score]] for entry in group if "depth" in entry["level"]]
        joined.append({**one, "depths": depths} if depths else one)
    return joined


class TaskTable:
    """The runs of one task: rows are models, columns levels."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        self.models = {
            model: sorted((run for run in records if run.variant == model), key=lambda run: run.seed)
            for model in ordered((run.variant for run in records), ORDER)
        }
        self.runs = [run for runs in self.models.values() for run in runs]
        found = {json.dumps(e["level"], sort_keys=True): e["level"] for run in self.runs for e in run.levels}
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

    def lines(self) -> list[str]:
        """Markdown: scores in per cent, the best of a column in bold, and what they are."""
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

    def at_length(self, runs: Sequence[RunRecord], length: int) -> list[float]:
        """The score of every seed at a length, a mean where several levels have it."""
        found = [[e[run.score] for e in run.levels if e["level"].get("length") == length] for run in runs]
        return [statistics.mean(scores) for scores in found if scores]

    def by_depth(self, model: str) -> dict[int, list[list[float]]]:
        """[depth, share] of a model's needles by length, means over seeds; empty where depths were not asked."""
        found = {}
        for level in self.levels:
            grids = [entry["depths"] for entry in self.entries(model, level) if "depths" in entry]
            if grids:
                pairs = zip(*grids, strict=True)
                found[level["length"]] = [[same[0][0], statistics.mean(x for _, x in same)] for same in pairs]
        return found

    def figure(self) -> Any:
        """Accuracy against length, training loss against steps (one seed), and maps of needles by depth."""
        from titanmem.train.plots import draw_map, split_figure

        maps = {model: found for model in self.models if (found := self.by_depth(model))}
        figure, (left, right), axes = split_figure(2, len(maps), across=4, width=5.2, height=4.4)
        self.draw(left, right)
        for axis, (model, found) in zip(axes, maps.items(), strict=True):
            depths = [depth for depth, _ in next(iter(found.values()))]
            grid = [[pairs[row][1] for pairs in found.values()] for row in range(len(depths))]
            draw_map(axis, grid, list(found), depths)
            axis.set_title(f"{model}: found, %", fontsize=9)
        return figure

    def draw(self, left: Any, right: Any) -> None:
        """The curves of all models."""
        styles = ("-", "--", ":", "-.")
        ticks = sorted({level["length"] for level in self.levels if "length" in level})
        for index, (model, runs) in enumerate(self.models.items()):
            look = {"color": f"C{index % 10}", "linestyle": styles[index // 10 % 4]}
            points = [(length, scores) for length in ticks if (scores := self.at_length(runs, length))]
            if points:
                lengths, means = zip(*((length, statistics.mean(scores)) for length, scores in points), strict=True)
                bars = [statistics.stdev(scores) if len(scores) > 1 else 0 for _, scores in points]
                left.errorbar(lengths, means, bars, marker="o", markersize=3, capsize=2, lw=1.2, label=model, **look)
            if runs[0].curve:
                right.plot(*zip(*runs[0].curve, strict=True), lw=1, **look)
        chances = [entry["chance"] for run in self.runs for entry in run.levels]
        left.axhline(min(chances), color="0.6", lw=1, label="chance")
        name = self.runs[0].experiment
        left.set(xscale="log", ylim=(-0.02, 1.03), xlabel="length of the row", ylabel="accuracy", title=name)
        left.set_xticks(ticks, [f"{length:,}" for length in ticks])
        left.minorticks_off()
        right.set(xlabel="step", yscale="log", title="training loss")
        left.figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)


def str_last(value: Any) -> tuple[bool, Any]:
    """Sorts numbers before texts."""
    return isinstance(value, str), value
