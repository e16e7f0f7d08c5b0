"""The paper's Table 3: forecasting with a look-back of 96, data sets × horizons × models × seeds.

    python benchmarks/forecast.py --data FOLDER [--models lmm,attention] [--seeds 0,1,2] [--parallel 10]
    python benchmarks/forecast.py --data FOLDER --plan lmm:0,1,2 mac:0 mag:0 mal:0 dlinear:0 rlinear:0 attention:0
    python benchmarks/forecast.py --show

FOLDER holds ETTh1.csv, ETTh2.csv, ETTm1.csv, ETTm2.csv and weather.csv, in folders or not. Every run leaves a JSON file
in the results' folder; what is there already is not run again. At the end the table beside the published numbers;
`python benchmarks/results.py` puts it into docs/results.md. Needs torch, numpy and tqdm, and no
installation; matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from titanmem.bench.pool import run_jobs
from titanmem.bench.record import RunRecord
from titanmem.bench.script import common, new_parser, numbers, run_script, save_picture
from titanmem.config import require
from titanmem.forecast import experiment
from titanmem.forecast.experiment import ForecastJob
from titanmem.train.config import parse_settings


def named_jobs(arguments: argparse.Namespace) -> list[ForecastJob]:
    """All runs that the command line asks for."""
    require(arguments.data is not None, "--data FOLDER is needed to run anything; --show shows what is there")
    plan = arguments.plan or [f"{model}:{arguments.seeds}" for model in arguments.models.split(",")]
    pairs = []
    for entry in plan:
        model, _, seeds = entry.partition(":")
        pairs += [(model, seed) for seed in numbers(seeds or "0", "seeds of --plan")]
    shared = {**common(arguments, parse_settings(arguments.set)), "data": str(arguments.data.resolve())}
    return [
        ForecastJob(model=model, seed=seed, dataset=dataset, horizon=horizon, **shared)
        for model, seed in dict.fromkeys(pairs)
        for dataset in arguments.datasets.split(",")
        for horizon in numbers(arguments.horizons, "--horizons")
    ]


def main() -> int:
    parser = new_parser(__doc__, Path(__file__))
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--datasets", default=",".join(experiment.DATASETS))
    parser.add_argument("--horizons", default=",".join(map(str, experiment.HORIZONS)))
    parser.add_argument("--models", default="lmm", help=f"of {', '.join(experiment.MODELS)}")
    parser.add_argument("--plan", nargs="+", metavar="MODEL:SEEDS", help="instead of --models and --seeds")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings, with a --label")
    parser.add_argument("--show", action="store_true", help="only the table and the picture of what is there")
    arguments = parser.parse_args()
    failed = [] if arguments.show else run_jobs(named_jobs(arguments), arguments.parallel)
    records = RunRecord.all_in(arguments.out)
    require(bool(records), f"no run is stored in {arguments.out}")
    print(f"\nMSE / MAE of all test windows, look-back 96 (± deviation over seeds)\n\n{experiment.table_3(records)}")
    save_picture(lambda: experiment.figure(records), arguments.runs / "table.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main, "forecast.py"))
