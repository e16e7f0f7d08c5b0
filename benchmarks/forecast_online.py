"""Does a memory that goes on learning help to forecast? The same test rows, forecast window by window from a fresh
memory and online, by models that were trained with a fresh memory for every window and on chains of windows.

    python benchmarks/forecast_online.py --data FOLDER [--datasets ETTh1,ETTh2] [--horizon 96] [--seeds 0,1]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs without being installed

import torch

from titanmem.bench.timing import machine
from titanmem.forecast.online import online_errors
from titanmem.recipes.series import benchmark_run
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.series import errors_on_test


def measure(
    dataset: str, horizon: int, chain: int, seed: int, data: Path, work: Path, epochs: int
) -> dict[str, object]:
    """Train a model; test it from a fresh memory, and with one that read all rows since the start of validation."""
    given = {"data.chain": chain, "data.epochs": epochs, "data.batch": 128 // chain}
    config = benchmark_run(dataset, horizon, "lmm", data, seed, given)
    folder = work / f"{dataset}-{horizon}-chain{chain}-seed{seed}"
    found = train(config, folder)
    if not found["complete"]:
        raise KeyboardInterrupt
    model = load_run(folder, best=True)[0].eval().to("cuda" if torch.cuda.is_available() else "cpu")
    source = config.open_source()
    begin = source.splits.train
    values = source.values[begin : begin + source.splits.validation + source.splits.test]
    values = values.to(next(model.parameters()).device)
    fresh = errors_on_test(config, model)
    shutil.rmtree(folder)
    return {
        "dataset": dataset, "horizon": horizon, "chain": chain, "seed": seed,
        "validation_mse": found["best"]["held_out"],
        "fresh": {name: fresh[name] for name in ("mse", "mae", "windows")},
        "online": online_errors(model, values, source.splits.validation),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--datasets", default="ETTh1,ETTh2")
    parser.add_argument("--horizon", type=int, default=96)
    parser.add_argument("--chains", default="1,4")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forecast_online.json"))
    parser.add_argument("--work", type=Path, default=Path("out/forecast-online"))
    arguments = parser.parse_args()
    held = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    for dataset in arguments.datasets.split(","):
        for chain in map(int, arguments.chains.split(",")):
            for seed in map(int, arguments.seeds.split(",")):
                done = {(r["dataset"], r["horizon"], r["chain"], r["seed"]) for r in held}
                if (dataset, arguments.horizon, chain, seed) not in done:
                    held.append(
                        measure(
                            dataset, arguments.horizon, chain, seed, arguments.data, arguments.work, arguments.epochs
                        )
                    )
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    arguments.out.write_text(json.dumps({"machine": machine(), "runs": held}, indent=1) + "\n")
    print("| data set | horizon | trained on | seed | fresh memory | memory going on |\n|---|---|---|---|---|---|")
    for r in held:
        kind = "windows" if r["chain"] == 1 else f"chains of {r['chain']}"
        cells = [f"{r[name]['mse']:.4f} / {r[name]['mae']:.4f}" for name in ("fresh", "online")]
        print(f"| {r['dataset']} | {r['horizon']} | {kind} | {r['seed']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
