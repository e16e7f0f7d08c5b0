"""DNA classification on GUE (DNABERT-2): tasks × models × seeds, with the official splits and one budget for all.

Every model is trained with every learning rate of the same grid and the first seed; the rate with the best dev MCC is
trained with the other seeds. The test split is read with the checkpoint that is best on dev. The sets of
GenomicBenchmarks, which the paper uses, run by the paper's protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from titanmem.bench import search
from titanmem.bench.job import TrainingJob, device
from titanmem.bench.record import RunRecord, mean_and_deviation, ordered
from titanmem.config import require
from titanmem.recipes.dna import classification
from titanmem.train.config import RunConfig
from titanmem.train.export import load_run
from titanmem.train.sequence import SequenceRun, score_split

TASKS = {
    **{f"tf/{number}": f"tf/{number}" for number in range(5)},
    **{name: f"prom/prom_{name}" for name in ("core_all", "core_tata", "300_tata")},
}
GENOMIC = {  # names in GenomicBenchmarks, and the accuracy of the neural memory in Table 4 of the paper
    "human_enhancers_cohn": 75.2,
    "human_enhancers_ensembl": 89.6,
    "human_ensembl_regulatory": 89.3,
    "human_nontata_promoters": 96.6,
    "human_ocr_ensembl": 79.9,
}
MODELS = ("lmm", "mac", "mag", "mal", "attention", "cnn")
RATES = (5e-4, 1.5e-3, 4e-3)
SEEDS = (0, 1, 2)
STEPS = 1500
TITLES = {"mcc": "MCC", "accuracy": "accuracy", "f1": "F1"}
Cells = dict[tuple[str, str], list[float]]


@dataclass(frozen=True, kw_only=True)
class GueJob(TrainingJob):
    """A model on a task with a learning rate, which is one of the settings."""

    task: str
    data: str  # folder of the tasks

    @property
    def experiment(self) -> str:
        return "dna"

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.task.replace('/', '-')}-lr{self.settings['optim.lr']:g}-{self.seed}"

    @property
    def weight(self) -> float:
        """The bases of a row, of both strands where both are read."""
        bases = 300 if self.task == "300_tata" else 70 if self.task.startswith("core") else 2 * 101
        return bases * (0.25 if self.model == "cnn" else 1)

    @property
    def steps(self) -> int:
        return self.config().steps if self.task in GENOMIC else int(self.settings.get("steps", STEPS))

    def config(self) -> SequenceRun:
        """Strands: a factor binds either of them, a promoter has a direction."""
        if self.task in GENOMIC:
            given = {**self.settings, "seed": self.seed}
            return classification(self.model, f"genomic:{self.task}").change(given).fit(given)
        either = self.task.startswith("tf/")
        settings = {
            "steps": STEPS, "data.batch": 256, "data.flip": either, "model.both_strands": either, "eval_every": 50,
            "save_every": self.steps, "log_every": 50, "patience": 10, "keep": 1, **self.settings, "seed": self.seed,
        }  # fmt: skip
        return classification(self.model, str(Path(self.data) / TASKS[self.task])).change(settings).fit(settings)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        """Scores on test and dev of the checkpoint that is best on dev."""
        assert isinstance(config, SequenceRun)
        model, step = load_run(self.folder, best=True)
        splits = config.data.open(config.model.classes).splits
        dev, test = (score_split(model.to(device()).eval(), splits[name]) for name in ("dev", "test"))
        numbers = {name: test[name] for name in (*TITLES, "loss", "rows", "confusion")}
        return {
            "levels": [{"level": {"task": self.task}, **numbers, "chance": 0.0}],
            "score": "mcc",
            "metrics": {"dev_mcc": dev["mcc"], "dev_loss": dev["loss"], "best_step": step},
        }

    def brief(self, record: RunRecord) -> str:
        test = record.levels[0]["mcc"]
        return f"{record.minutes:.1f} minutes, MCC dev {record.metrics['dev_mcc']:.3f}, test {test:.3f}"


def tasks_in(folder: Path, tasks: Sequence[str]) -> Path:
    """The folder of the tasks, which may be GUE's own or that around it; they have to be there."""
    folder = folder / "gue" if (folder / "gue").is_dir() else folder
    for task in tasks:
        require(task in TASKS, f"unknown task {task!r}; known: {', '.join(TASKS)}")
        place = folder / TASKS[task]
        require((place / "train.csv").exists(), f"{place / 'train.csv'} is missing; give the folder of GUE's tasks")
    return folder


def cell_of(record: RunRecord) -> tuple[str, str]:
    """Task and model."""
    return record.levels[0]["level"]["task"], record.variant


def chosen(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Of every task and model the runs with the learning rate whose first seed has the best dev MCC."""
    return search.chosen(records, cell_of, lambda record: -record.metrics["dev_mcc"])


def by_cell(records: Sequence[RunRecord], metric: str) -> tuple[list[str], list[str], Cells]:
    """Models, tasks, and the scores in % of all seeds by both."""
    cells: Cells = {}
    for record in records:
        for entry in record.levels:
            cells.setdefault((record.variant, entry["level"]["task"]), []).append(100 * entry[metric])
    models = ordered((model for model, _ in cells), MODELS)
    return models, ordered((task for _, task in cells), [*TASKS, *GENOMIC]), cells


def table(records: Sequence[RunRecord], metric: str = "mcc") -> str:
    """Mean ± deviation over seeds, a line for every task, as Markdown; the best of a line is bold."""
    models, tasks, cells = by_cell(records, metric)
    lines = [f"| test {TITLES[metric]}, % | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
    for task in tasks:
        found = {model: cells[model, task] for model in models if (model, task) in cells}
        best = max(map(mean, found.values()))
        shown = {model: mean_and_deviation(scores, 1) for model, scores in found.items()}
        shown |= {model: f"**{shown[model]}**" for model, scores in found.items() if mean(scores) == best}
        lines.append(f"| {task} | {' | '.join(shown.get(model, '') for model in models)} |")
    means = [[mean(cells[model, task]) for task in tasks if (model, task) in cells] for model in models]
    whole = [f"{mean(found):.1f}" if len(found) == len(tasks) else "" for found in means]
    return "\n".join([*lines, f"| mean | {' | '.join(whole)} |"])


def published() -> str:
    """The paper's own numbers, on other sets."""
    shown = ", ".join(f"{name} {score}" for name, score in GENOMIC.items())
    return f"Published (Titans, Table 4: accuracy of the neural memory on GenomicBenchmarks, other sets): {shown}."


def figure(records: Sequence[RunRecord], metric: str = "mcc") -> Any:
    """A bar for every model and task, a dot for every seed."""
    from titanmem.train.plots import new_figure

    models, tasks, cells = by_cell(records, metric)
    drawn, (axis,) = new_figure(1, width=max(6.0, 1.4 + 1.2 * len(tasks)), height=3.6)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        places = [place + (index - (len(models) - 1) / 2) * width for place in range(len(tasks))]
        values = [cells.get((model, task), []) for task in tasks]
        axis.bar(places, [mean(v) if v else 0 for v in values], width, label=model, alpha=0.75)
        dots = [(place, score) for place, scores in zip(places, values, strict=True) for score in scores]
        axis.plot(*zip(*dots, strict=True), ".", color="black", markersize=3)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set(ylabel=f"test {TITLES[metric]}, %", title="classification of DNA, models of equal size")
    axis.legend(frameon=False, fontsize=8, ncols=len(models), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return drawn
