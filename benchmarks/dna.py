"""DNA classification on GUE: LMM, MAC, MAG, MAL, a transformer and a CNN of equal size, trained from scratch.

    python benchmarks/dna.py GUE_FOLDER [--parallel N] [--tasks tf/0 …] [--models lmm …]

Official splits, three learning rates chosen on dev, three seeds; MCC and accuracy on test. One JSON file per run in
benchmarks/results/dna; what is there is not run again. Where matplotlib is missing there is a table and no picture:
the same command on another machine draws it from the files.
"""

from __future__ import annotations

import argparse
import importlib.util
from functools import partial
from pathlib import Path

from titanmem.bench import gue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with tf/0 …, prom/prom_core_all …")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each a process (default: 1)")
    parser.add_argument("--tasks", nargs="+", default=list(gue.TASKS), help=f"of {', '.join(gue.TASKS)}")
    parser.add_argument("--models", nargs="+", default=list(gue.MODELS), help="lmm, mac, …, cnn")
    parser.add_argument("--rates", nargs="+", type=float, default=list(gue.RATES), help="learning rates tried on dev")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(gue.SEEDS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dna"))
    parser.add_argument("--work", type=Path, default=Path("runs/gue"), help="checkpoints and logs of unfinished runs")
    given = vars(parser.parse_args())
    data, out = given.pop("data"), given.pop("out")
    try:
        records = gue.run_all(data, out, say=partial(print, flush=True), **given)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not records:
        raise SystemExit("no run succeeded; the logs are in the folder of --work")
    for metric in ("mcc", "accuracy"):
        print(f"\n{gue.table(records, metric)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("\nmatplotlib is not installed: no picture")
    else:
        file = out / "gue.png"
        gue.draw(records, file)
        print(f"\npicture: {file}")


if __name__ == "__main__":
    main()
