"""The paper's Table 3: data sets × horizons × models × seeds, each run one JSON file, beside the published numbers."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HORIZONS = (96, 192, 336, 720)
DATASETS = ("ETTm1", "ETTm2", "ETTh1", "ETTh2", "Weather")
ORDER = ("lmm", "mac", "mag", "mal", "attention", "rlinear", "dlinear")  # of the columns
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


@dataclass(frozen=True)
class Case:
    """One run."""

    dataset: str
    horizon: int
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dataset}-{self.horizon}-seed{self.seed}"

    @property
    def weight(self) -> int:
        """Roughly how long it takes, so that a model's longest runs begin first."""
        return {"Weather": 3, "ETTm1": 2, "ETTm2": 2, "ECL": 60, "Traffic": 120}.get(self.dataset, 1)


def run_case(case: Case, data: str, results: str, work: str, settings: dict[str, Any], keep: bool = False) -> float:
    """Train, take the checkpoint that validation likes best, test it, write RESULTS/NAME.json; returns the MSE."""
    from titanmem.bench.timing import machine
    from titanmem.recipes.series import benchmark_run
    from titanmem.train.export import load_run
    from titanmem.train.loop import train
    from titanmem.train.provenance import provenance
    from titanmem.train.series import errors_on_test

    target, folder = Path(results) / f"{case.name}.json", Path(work) / case.name
    folder.mkdir(parents=True, exist_ok=True)
    before, sys.stderr = sys.stderr, (folder / "log.txt").open("a")
    try:
        config = benchmark_run(case.dataset, case.horizon, case.model, data, case.seed, settings)
        begin = time.perf_counter()
        found = train(config, folder)
        seconds = time.perf_counter() - begin
        if not found["complete"]:
            raise KeyboardInterrupt
        device = "cuda" if torch.cuda.is_available() else "cpu"
        best, step = load_run(folder, best=True)
        errors = errors_on_test(config, best.to(device).eval())
    finally:
        sys.stderr.close()
        sys.stderr = before
    record = {
        "experiment": "forecast",
        "model": case.model,
        "seed": case.seed,
        "results": [
            {
                "level": {"dataset": case.dataset, "horizon": case.horizon},
                **{name: errors[name] for name in ("mse", "mae", "windows")},
            }
        ],
        "validation_mse": found["best"]["held_out"],
        "best_step": step,
        "steps": found["step"],
        "seconds": round(seconds, 1),
        "parameters": config.model.parameters(),
        "config": {**config.to_dict(), "data": {**config.data.to_dict(), "path": Path(config.data.path).name}},
        "machine": machine(),
        "commit": provenance()["commit"],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=1) + "\n")
    aside.replace(target)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return float(errors["mse"])


def run_cases(
    cases: Sequence[Case], data: Path, results: Path, work: Path, parallel: int, settings: dict[str, Any], keep: bool
) -> list[str]:
    """All cases that have no result yet, several at a time as processes of their own; returns what failed."""
    groups = list(dict.fromkeys((c.model, c.seed) for c in cases))  # in the order they were asked for
    todo = [case for case in cases if not (results / f"{case.name}.json").exists()]
    todo.sort(key=lambda case: (groups.index((case.model, case.seed)), -case.weight))
    print(f"{len(todo)} of {len(cases)} runs to do, {parallel} at a time", flush=True)
    begin, failed = time.perf_counter(), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(parallel, len(todo))), mp_context=spawn, initializer=_quiet) as pool:
        given = (str(data), str(results), str(work), settings, keep)
        running = {pool.submit(run_case, case, *given): case for case in todo}
        try:
            for number, done in enumerate(as_completed(running), 1):
                case, trouble = running[done], done.exception()
                took = time.perf_counter() - begin
                if trouble is None:
                    said = f"MSE {done.result():.4f}"
                else:
                    said = f"failed: {trouble or type(trouble).__name__}"
                    failed.append(f"{case.name}: {trouble or type(trouble).__name__}")
                left = took / number * (len(todo) - number)
                print(f"{number}/{len(todo)} {case.name}: {said} ({took:.0f} s, about {left:.0f} s left)", flush=True)
        except KeyboardInterrupt:  # the workers got it too: each writes a checkpoint and ends
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return failed


def _quiet() -> None:
    torch.set_num_threads(1)


# -- what came out ------------------------------------------------------------------------------------------------


def load_records(results: Path) -> list[dict[str, Any]]:
    """All results in a folder."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("*-seed*.json"))]


def means(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """model → data set → MSE and MAE as means over all horizons, over the seeds that have all of them."""
    found: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    for record in records:
        for result in record["results"]:
            level = result["level"]
            found.setdefault((record["model"], level["dataset"], record["seed"]), {})[level["horizon"]] = result
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for (model, dataset, _), by_horizon in sorted(found.items()):
        if set(by_horizon) == set(HORIZONS):
            cell = table.setdefault(model, {}).setdefault(dataset, {"mse": [], "mae": []})
            for name in ("mse", "mae"):
                cell[name].append(statistics.mean(result[name] for result in by_horizon.values()))
    return table


def _cell(held: dict[str, Any] | None) -> str:
    if held is None:
        return "–"
    mse, mae = (statistics.mean(held[name]) for name in ("mse", "mae"))
    spread = f" ±{statistics.stdev(held['mse']):.3f}" if len(held["mse"]) > 1 else ""
    return f"{mse:.3f}{spread} / {mae:.3f}"


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: every horizon of every model, then the means beside the published ones."""
    there = {record["model"] for record in records}
    models = [*(model for model in ORDER if model in there), *sorted(there - set(ORDER))]
    single: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for record in records:
        for result in record["results"]:
            key = (record["model"], result["level"]["dataset"], result["level"]["horizon"])
            held = single.setdefault(key, {"mse": [], "mae": []})
            held["mse"].append(result["mse"])
            held["mae"].append(result["mae"])
    lines = ["MSE / MAE of all test windows, look-back 96 (± standard deviation over seeds)", ""]
    lines += [f"| | | {' | '.join(models)} |", f"|---|---|{'---|' * len(models)}"]
    for dataset in [d for d in (*DATASETS, "ECL", "Traffic") if any(key[1] == d for key in single)]:
        for horizon in sorted({key[2] for key in single if key[1] == dataset}):
            cells = [_cell(single.get((model, dataset, horizon))) for model in models]
            lines.append(f"| {dataset} | {horizon} | {' | '.join(cells)} |")
    table = means(records)
    if table:
        whole = [model for model in models if model in table]
        titles = [*whole, *(f"published: {name}" for name in PUBLISHED)]
        lines += ["", "Means over the horizons 96, 192, 336, 720", ""]
        lines += [f"| | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
        for dataset in [d for d in PUBLISHED["DLinear"] if any(d in cells for cells in table.values())]:
            ours = [_cell(table[model].get(dataset)) for model in whole]
            theirs = ["{:.3f} / {:.3f}".format(*numbers[dataset]) for numbers in PUBLISHED.values()]
            lines.append(f"| {dataset} | {' | '.join([*ours, *theirs])} |")
    return "\n".join(lines)


def figure(records: Sequence[dict[str, Any]]) -> Any | None:
    """Means over horizons, every seed a dot, beside the published ones; None before a data set is whole."""
    from titanmem.train.plots import new_figure

    table = means(records)
    datasets = [d for d in DATASETS if any(d in cells for cells in table.values())]
    if not datasets:
        return None
    drawn, axes = new_figure(len(datasets), width=2.3, height=3.6)
    names = [*[model for model in ORDER if model in table], *(model for model in table if model not in ORDER)]
    for axis, dataset in zip(axes, datasets, strict=True):
        for place, model in enumerate(names):
            found = table[model].get(dataset, {"mse": []})["mse"]
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
