"""Small data of every kind that the experiments read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from titanmem.data.series import Series, write_series

WORDS = "the memory learns while it reads and forgets what it has to a river runs by old stones".split()  # noqa: SIM905


def write_novels(folder: Path, count: int = 40) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        draw = random.Random(number)
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=180)) + ".\n")
    return folder


def write_babi(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        draw, lines = random.Random(split), []
        for _ in range(20):
            place = draw.choice(["garden", "kitchen"])
            lines += [f"1 Mary went to the {place}.", f"2 Where is Mary? \t{place}\t1"]
        (folder / f"qa1_one_{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_series_set(folder: Path) -> Path:
    values = np.sin(np.arange(520)[:, None] / [2.0, 3.0]) + np.random.default_rng(0).normal(0, 0.1, (520, 2))
    times = np.datetime64("2024-01-01", "us") + np.arange(520) * np.timedelta64(1, "h")
    write_series(folder / "ETT-small" / "ETTh1.csv", Series(["a", "b"], values, times, "date"))
    return folder


def write_gue(folder: Path) -> Path:
    draw, place = random.Random(0), folder / "gue" / "tf" / "0"
    place.mkdir(parents=True)
    for split, rows in {"train": 32, "dev": 20, "test": 20}.items():
        lines = [f"{''.join(draw.choices('ACGT', k=24))},{number % 2}" for number in range(rows)]
        (place / f"{split}.csv").write_text("\n".join(["sequence,label", *lines]) + "\n")
    return folder
