"""The paper's Table 3: data sets × horizons × models × seeds, each run one JSON file, beside the published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from titanmem.bench.job import TrainingJob, device
from titanmem.bench.record import RunRecord, mean_and_deviation, ordered
from titanmem.models.series import LINEAR
from titanmem.recipes.series import benchmark_run
from titanmem.train.config import RunConfig
from titanmem.train.export import load_run
from titanmem.train.series import SeriesRun, errors_on_test

HORIZONS = (96, 192, 336, 720)
DATASETS = ("ETTm1", "ETTm2", "ETTh1", "ETTh2", "Weather")
MODELS = ("lmm", "mac", "mag", "mal", "attention", "rlinear", "dlinear")  # in the order of the columns
AVERAGE = "mean"
# Table 3 of the paper (arXiv 2501.00663): MSE / MAE, means over the four horizons, look-back 96
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "Neural Memory": {
        "ETTm1": (0.358, 0.387), "ETTm2": (0.261, 0.309), "ETTh1": (0.420, 0.421), "ETTh2": (0.336, 0.382),
        "ECL": (0.162, 0.261), "Traffic": (0.415, 0.289), "Weather": (0.231, 0.265),
    },
    "Simba": {
        "ETTm1": (0.383, 0.396), "ETTm2": (0.271, 0.327), "ETTh1": (0.441, 0.432), "ETTh2": (0.361, 0.391),
        "ECL": (0.169, 0.274), "Traffic": (0.493, 0.291), "Weather": (0.255, 0.280),
    },
    "iTransformer": {
        "ETTm1": (0.407, 0.410), "ETTm2": (0.288, 0.332), "ETTh1": (0.454, 0.447), "ETTh2": (0.383, 0.407),
        "ECL": (0.178, 0.270), "Traffic": (0.428, 0.282), "Weather": (0.258, 0.278),
    },
    "PatchTST": {
        "ETTm1": (0.387, 0.400), "ETTm2": (0.281, 0.326), "ETTh1": (0.469, 0.454), "ETTh2": (0.387, 0.407),
        "ECL": (0.205, 0.290), "Traffic": (0.481, 0.304), "Weather": (0.259, 0.281),
    },
    "DLinear": {
        "ETTm1": (0.403, 0.407), "ETTm2": (0.350, 0.401), "ETTh1": (0.456, 0.452), "ETTh2": (0.559, 0.515),
        "ECL": (0.212, 0.300), "Traffic": (0.625, 0.383), "Weather": (0.265, 0.317),
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ForecastJob(TrainingJob):
    """A model on a data set at a horizon."""

    dataset: str
    horizon: int
    data: str  # folder with the data sets

    @property
    def experiment(self) -> str:
        return "forecast"

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.dataset}-{self.horizon}-{self.seed}"

    @property
    def weight(self) -> float:
        size = {"Weather": 3, "ETTm1": 2, "ETTm2": 2, "ECL": 60, "Traffic": 120}.get(self.dataset, 1)
        return size * (0.25 if self.model in LINEAR else 1)

    def config(self) -> SeriesRun:
        return benchmark_run(self.dataset, self.horizon, self.model, self.data, self.seed, self.settings)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        """Errors over all test windows of the checkpoint that validation likes best."""
        assert isinstance(config, SeriesRun)
        best, step = load_run(self.folder, best=True)
        errors = errors_on_test(config, best.to(device()).eval())
        level = {"dataset": self.dataset, "horizon": self.horizon}
        return {
            "levels": [{"level": level, "mse": errors["mse"], "mae": errors["mae"], "rows": errors["windows"]}],
            "score": "mse",
            "metrics": {"validation_mse": found["best"]["held_out"], "best_step": step},
        }

    def brief(self, record: RunRecord) -> str:
        return f"{record.minutes:.1f} minutes, MSE {record.levels[0]['mse']:.4f}, MAE {record.levels[0]['mae']:.4f}"


@dataclass(frozen=True)
class Cell:
    """Errors of one model, one number for every seed."""

    mse: list[float]
    mae: list[float]

    def shown(self) -> str:
        return f"{mean_and_deviation(self.mse, 3)} / {mean_and_deviation(self.mae, 3)}"


Table = dict[tuple[str, str, int | str], Cell]  # by model, data set and horizon, or their mean


def cells(records: Sequence[RunRecord]) -> Table:
    """Every horizon, and the means over all four of the seeds that have them."""
    found: dict[tuple[str, str], dict[int, dict[int, dict[str, Any]]]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        for entry in record.levels:
            held = found.setdefault((record.variant, entry["level"]["dataset"]), {}).setdefault(record.seed, {})
            held[entry["level"]["horizon"]] = entry
    table: Table = {}
    for (model, dataset), seeds in found.items():
        for horizon in sorted({horizon for by_horizon in seeds.values() for horizon in by_horizon}):
            there = [by_horizon[horizon] for by_horizon in seeds.values() if horizon in by_horizon]
            table[model, dataset, horizon] = Cell([e["mse"] for e in there], [e["mae"] for e in there])
        whole = [by_horizon.values() for by_horizon in seeds.values() if set(HORIZONS) <= set(by_horizon)]
        if whole:
            means = ([mean(entry[name] for entry in entries) for entries in whole] for name in ("mse", "mae"))
            table[model, dataset, AVERAGE] = Cell(*means)
    return table


def table_3(records: Sequence[RunRecord]) -> str:
    """Markdown: data sets and horizons by models, the published means beside ours; the lowest MSE of ours is bold."""
    table = cells(records)
    models = ordered((model for model, _, _ in table), MODELS)
    lines = ["| | | " + " | ".join([*models, *(f"*{name}, published*" for name in PUBLISHED)]) + " |"]
    lines.append("|---|---|" + "---|" * (len(models) + len(PUBLISHED)))
    for dataset in ordered((dataset for _, dataset, _ in table), list(PUBLISHED["DLinear"])):
        horizons = {horizon for _, d, horizon in table if d == dataset}
        for horizon in sorted(horizons, key=lambda h: (h == AVERAGE, h)):
            ours = [table.get((model, dataset, horizon)) for model in models]
            best = min(mean(cell.mse) for cell in ours if cell is not None)
            row = ["" if cell is None else _bold(cell.shown(), mean(cell.mse) == best) for cell in ours]
            for numbers in PUBLISHED.values():
                row.append("{:.3f} / {:.3f}".format(*numbers[dataset]) if horizon == AVERAGE else "")
            lines.append(f"| {dataset} | {horizon} | {' | '.join(row)} |")
    return "\n".join(lines)


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def figure(records: Sequence[RunRecord]) -> Any | None:
    """Means over horizons, every seed a dot, beside the published ones; None before a data set is whole."""
    from titanmem.train.plots import new_figure

    means = {(model, dataset): cell for (model, dataset, horizon), cell in cells(records).items() if horizon == AVERAGE}
    datasets = ordered((dataset for _, dataset in means), DATASETS)
    if not datasets:
        return None
    names = ordered((model for model, _ in means), MODELS)
    drawn, axes = new_figure(len(datasets), width=2.3, height=3.6)
    for axis, dataset in zip(axes, datasets, strict=True):
        for place, model in enumerate(names):
            found = means[model, dataset].mse if (model, dataset) in means else []
            axis.scatter([place] * len(found), found, color="C0", s=26, zorder=3)
        for place, numbers in enumerate(PUBLISHED.values(), len(names)):
            axis.scatter([place], [numbers[dataset][0]], color="0.45", marker="D", s=20, zorder=3)
        axis.axvline(len(names) - 0.5, color="0.8", linewidth=0.8)
        axis.set_xticks(range(len(names) + len(PUBLISHED)), [*names, *PUBLISHED], rotation=90, fontsize=8)
        axis.set_title(dataset, fontsize=10)
        axis.tick_params(axis="y", labelsize=8)
    axes[0].set_ylabel("MSE, mean over horizons")
    drawn.suptitle("Forecasting, look-back 96: ours (blue) and published (grey)", fontsize=11)
    return drawn
