"""What the commands that run jobs have in common."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def numbers(text: str, option: str, kind: type = int) -> list[Any]:
    """Numbers with commas."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} are {what} with commas, got {text!r}") from None


def shapes(text: str, option: str) -> list[tuple[int, int]]:
    """ROWSxLENGTH with commas."""
    pairs = re.findall(r"([1-9][0-9]*)x([1-9][0-9]*)(?:,|$)", text)
    if ",".join(map("x".join, pairs)) != text:
        raise ValueError(f"{option} are ROWSxLENGTH with commas, for instance 8x4096,1x32768; got {text!r}")
    return [(int(rows), int(length)) for rows, length in pairs]


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
