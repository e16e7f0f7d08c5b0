"""`titanmem plot RUN…`: loss curves of runs in one picture or page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that titanmem train wrote")
    parser.add_argument("--out", type=Path, default=Path("plot.html"), help="a .png or .html file (default: plot.html)")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.train.plots import plot_runs

    before = arguments.out.exists()
    plot_runs(arguments.runs, arguments.out)
    print(f"written to {arguments.out}")
    if before:
        print(f"{arguments.out} was there before and is replaced; --out NAME keeps both", file=sys.stderr)
    return 0
