"""Where a series is trained, validated and tested, as the published comparisons do it.

Windows of `look_back` rows and the `horizon` after them. Those of validation and test begin `look_back` rows before
their part, so that its first row is also predicted; every window counts. The scaler sees the training part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanmem.config import Config, require
from titanmem.data.series import Reading, Series, read_series

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Splits(Config):
    """How many rows each part has, one after another."""

    train: int
    validation: int
    test: int

    @staticmethod
    def of(rows: int, shares: Sequence[float]) -> Splits:
        """By shares that add up to 1 (0.7, 0.1, 0.2), or by numbers of rows (8640, 2880, 2880). What rounding leaves
        goes to validation."""
        first, middle, last = shares
        if all(type(share) is int for share in shares) and sum(shares) > 1:
            total = sum(shares)
            require(total <= rows, f"the split {list(shares)} needs {total:,} rows, there are {rows:,}")
            return Splits(int(first), int(middle), int(last))
        train, test = int(rows * first), int(rows * last)
        validation = rows - train - test if middle else 0
        return Splits(train, validation, test)

    def rows(self, part: str, look_back: int) -> slice:
        """The rows whose windows belong to a part."""
        begin = {"train": 0, "validation": self.train, "test": self.train + self.validation}[part]
        size = getattr(self, part)
        return slice(begin if part == "train" else max(0, begin - look_back), begin + size)

    def cut(self, series: Series) -> tuple[Series, int]:
        """A series up to the end of its test part, and where that begins."""
        first = self.train + self.validation
        return series.first(first + self.test), first

    def windows(self, part: str, look_back: int, horizon: int) -> int:
        """How many windows a part has."""
        rows = self.rows(part, look_back)
        return max(0, rows.stop - rows.start - look_back - horizon + 1) if getattr(self, part) else 0


@dataclass(frozen=True)
class Scaler:
    """Zero mean and unit deviation, column by column, of the rows it was fitted on."""

    mean: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def fit(values: np.ndarray) -> Scaler:
        """From rows [T, C]; a constant column, up to what its sums are rounded by, is only centred."""
        mean, deviation = values.mean(0), values.std(0)
        rounding = len(values) * np.finfo(np.float64).eps
        constant = deviation**2 <= rounding * deviation**2 + (rounding * mean) ** 2
        return Scaler(mean, np.where(constant, 1.0, deviation))

    def apply(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.deviation

    def undo(self, values: np.ndarray) -> np.ndarray:
        return values * self.deviation + self.mean


@dataclass(frozen=True)
class Benchmark:
    """A data set of the published comparisons: where it lies in a folder of data, and how it is split."""

    file: str
    shares: tuple[float, ...]


_HOURLY, _QUARTERS = (8640, 2880, 2880), (34_560, 11_520, 11_520)
_SHARES = (0.7, 0.1, 0.2)
BENCHMARKS = {
    "ETTm1": Benchmark("ETTm1.csv", _QUARTERS),
    "ETTm2": Benchmark("ETTm2.csv", _QUARTERS),
    "ETTh1": Benchmark("ETTh1.csv", _HOURLY),
    "ETTh2": Benchmark("ETTh2.csv", _HOURLY),
    "ECL": Benchmark("electricity.csv", _SHARES),
    "Traffic": Benchmark("traffic.csv", _SHARES),
    "Weather": Benchmark("weather.csv", _SHARES),
}


def find_benchmark(name: str, folder: str | Path) -> Path:
    """The file of a data set somewhere in a folder."""
    require(name in BENCHMARKS, f"unknown data set {name!r}; known: {', '.join(BENCHMARKS)}")
    wanted = BENCHMARKS[name].file
    found = sorted(path for path in Path(folder).rglob("*.csv") if path.name.lower() == wanted.lower())
    if not found:
        raise FileNotFoundError(f"no {wanted} in {folder}; docs/forecasting.md says where the data sets come from")
    return found[0]


def read_benchmark(name: str, folder: str | Path) -> tuple[Series, Splits]:
    """A data set as the protocol takes it: rows as they are, nothing filled, Weather's −9999 among the values."""
    series = read_series(find_benchmark(name, folder), Reading(missing="error", irregular="keep"))
    return series, Splits.of(len(series), BENCHMARKS[name].shares)
