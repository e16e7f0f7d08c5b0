"""The paper's Table 3: forecasting with a look-back of 96, data sets × horizons × models × seeds.

    python benchmarks/forecast.py --data FOLDER [--models lmm,attention] [--seeds 0,1,2] [--parallel 10]
    python benchmarks/forecast.py --data FOLDER --plan lmm:0,1,2 mac:0 mag:0 mal:0 dlinear:0 rlinear:0 attention:0
    python benchmarks/forecast.py --show

FOLDER holds ETTh1.csv, ETTh2.csv, ETTm1.csv, ETTm2.csv and weather.csv, in folders or not. Every run leaves a JSON file
in the results' folder; what is there already is not run again. At the end the table beside the published numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs without being installed

from titanmem.forecast import experiment
from titanmem.train.config import parse_settings


def cases_of(arguments: argparse.Namespace) -> list[experiment.Case]:
    """What the command line asks for."""
    plan = arguments.plan or [f"{model}:{arguments.seeds}" for model in arguments.models.split(",")]
    pairs = []
    for entry in plan:
        model, _, seeds = entry.partition(":")
        pairs += [(model, int(seed)) for seed in (seeds or "0").split(",")]
    return [
        experiment.Case(dataset, int(horizon), model, seed)
        for model, seed in pairs
        for dataset in arguments.datasets.split(",")
        for horizon in arguments.horizons.split(",")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--datasets", default=",".join(experiment.DATASETS))
    parser.add_argument("--horizons", default=",".join(map(str, experiment.HORIZONS)))
    parser.add_argument("--models", default="lmm", help="of lmm, mac, mag, mal, attention, rlinear, dlinear")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--plan", nargs="+", metavar="MODEL:SEEDS", help="instead of --models and --seeds")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each a process (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forecast"))
    parser.add_argument("--work", type=Path, default=Path("out/forecast"), help="folder of the runs while they run")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders with their checkpoints")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings, for a search")
    parser.add_argument("--show", action="store_true", help="only the table and the picture of what is there")
    arguments = parser.parse_args()
    failed: list[str] = []
    if not arguments.show:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything; --show shows what is there")
        failed = experiment.run_cases(
            cases_of(arguments), arguments.data, arguments.out, arguments.work, arguments.parallel,
            parse_settings(arguments.set), arguments.keep,
        )  # fmt: skip
    records = experiment.load_records(arguments.out)
    print("\n" + experiment.summary(records))
    try:
        drawn = experiment.figure(records)
    except ValueError as error:
        print(error)
    else:
        if drawn is not None:
            drawn.savefig(arguments.out / "table.png")
            print(f"\npicture: {arguments.out / 'table.png'}")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
