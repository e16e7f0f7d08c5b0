"""What the scripts that run jobs have in common: their options, and how they end."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def new_parser(description: str | None, script: Path, seeds: str = "0") -> ArgumentParser:
    """A parser with the common options. The folders have the script's name."""
    root, name = script.resolve().parents[1], script.stem
    out, runs = root / "benchmarks" / "results" / name, root / "out" / name
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=seeds, help=f"of every model, with commas (default: {seeds})")
    parser.add_argument("--label", default="", help="a name for runs with other settings: lmm+LABEL in the tables")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once on this device (default: 1)")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of JSON (default: benchmarks/results/{name})")
    parser.add_argument("--runs", type=Path, default=runs, help=f"folder of logs and checkpoints (default: out/{name})")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs too")
    return parser


def common(arguments: Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """What all jobs of a command share."""
    places = {"out": arguments.out.resolve(), "runs": arguments.runs.resolve()}
    return {"label": arguments.label, "settings": settings, **places, "keep": arguments.keep}


def numbers(text: str, option: str, kind: type = int) -> list[Any]:
    """Numbers with commas."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} are {what} with commas, got {text!r}") from None


def run_script(main: Callable[[], int], name: str) -> int:
    """The exit code: 2 for what was asked wrongly, 130 for Ctrl-C, else what `main` says."""
    try:
        return main()
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def save_picture(draw: Callable[[], Any | None], file: Path) -> None:
    """Where matplotlib is missing there is none; the same command draws it on another machine."""
    try:
        drawn = draw()
    except ValueError as error:
        print(f"\n{error}")
        return
    if drawn is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(file)
        print(f"\npicture: {file}")
