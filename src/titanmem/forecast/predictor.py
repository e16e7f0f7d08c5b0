"""A trained forecaster with what it knows about its table: columns, scales, how to read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanmem.config import require
from titanmem.data.series import Reading, Series, UnknownColumns, fill_missing, read_rows
from titanmem.data.splits import Scaler
from titanmem.data.times import parse_step, show_step, show_time
from titanmem.models.base import find_device, load
from titanmem.models.series import Forecaster
from titanmem.train.config import RunConfig
from titanmem.train.export import export, read_run
from titanmem.train.series import BESIDE, SeriesData, SeriesRun, window_errors

FARTHEST = 1e12  # of a scaled value from 0: sums of squares of larger ones are no float32


@dataclass(frozen=True)
class Predictor:
    """Forecasts in the units of the table.

    >>> predictor = Predictor.open("runs/power")
    >>> future = predictor.predict(predictor.read("power.csv"))    # a Series of `horizon` rows
    """

    model: Forecaster
    columns: list[str]
    scaler: Scaler
    data: SeriesData
    step: str  # between rows, in words

    @staticmethod
    def open(folder: str | Path, device: torch.device | str | None = None) -> Predictor:
        """A folder that titanmem export wrote, or a run of titanmem forecast train (its best checkpoint)."""
        path = Path(folder)
        require(path.is_dir(), f"no model at {path}; expected a folder that titanmem forecast train or export wrote")
        if (path / "checkpoints").exists():
            path = _exported(path)
        require((path / BESIDE).exists(), f"{path} has no {BESIDE}; expected a forecaster that titanmem export wrote")
        model = load(path, find_device(device))
        require(isinstance(model, Forecaster), f"{path} holds no forecaster ({type(model.config).__name__})")
        assert isinstance(model, Forecaster)
        about = json.loads((path / BESIDE).read_text())
        scaler = Scaler(np.array(about["mean"]), np.array(about["deviation"]))
        return Predictor(model.eval(), about["columns"], scaler, SeriesData.from_dict(about["data"]), about["step"])

    def read(self, path: str | Path, **how: Any) -> Series:
        """A table as the model's own was read; `how` overrides settings of `Reading`. Its rows must be as far apart as
        there, unless they are numbered or taken as they stand."""
        asked = replace(self.data.reading(), columns=tuple(self.columns), **how)
        return fill_missing(self._read(path, asked), asked.missing, str(path))

    def read_new(self, path: str | Path, **how: Any) -> Series:
        """The same for a stream, which fills missing values from its own past: they are left as NaN."""
        require(
            how.get("missing") != "linear",
            "--missing linear looks ahead, which a stream cannot; leave it out: a missing value takes the one before",
        )
        asked = replace(self.data.reading(), columns=tuple(self.columns), **how)
        series = self._read(path, asked)
        gone = int(np.isnan(series.values).sum())
        if gone == 0 or asked.missing == "error":
            return fill_missing(series, asked.missing, str(path))
        note = f"{gone:,} of {series.values.size:,} values are missing; each takes the value before it in the stream"
        note += ", or the mean of the training part where there is none"
        return replace(series, notes=[*series.notes, note])

    def _read(self, path: str | Path, asked: Reading) -> Series:
        """Rows with their gaps, as far apart as those of the model's own table."""
        with self.naming_columns():
            series = read_rows(path, asked)
        if (asked.time or "").lower() == "none":
            return series
        if len(series) == 1:
            return replace(series, step=parse_step(self.step, series.times[0]))
        require(
            asked.irregular == "keep" or show_step(series.step) == self.step,
            f"{path}: rows are mostly {show_step(series.step)} apart, those the model was trained on {self.step}; "
            "give such a table, or take rows as they stand with --irregular keep",
        )
        return series

    @contextmanager
    def naming_columns(self) -> Iterator[None]:
        """An error about a column that is not there says which ones the model was trained on."""
        try:
            yield
        except UnknownColumns as error:
            raise UnknownColumns(
                f"{error}; the model was trained on {', '.join(self.columns)}: give a table with these columns (rename "
                "those that mean the same), or train a model on this one (titanmem forecast train)"
            ) from error

    @property
    def look_back(self) -> int:
        return self.model.config.look_back

    @property
    def horizon(self) -> int:
        return self.model.config.horizon

    def scaled(self, series: Series) -> Tensor:
        """The model's columns of a table, scaled, [T, C] on its device."""
        with self.naming_columns():
            return self.scale(series.choose(self.columns).values)

    def truth(self, series: Series) -> Tensor:
        """The same with NaN where the table has no value."""
        return self.scale(series.choose(self.columns).truth)

    def scale(self, rows: np.ndarray) -> Tensor:
        """Rows [n, C] in the table's units, scaled, on the model's device."""
        values = self.scaler.apply(rows)
        far = np.argwhere(np.abs(values) > FARTHEST)
        if len(far):
            row, column = far[0]
            raise ValueError(
                f"{self.columns[column]!r} has the value {rows[row, column]:g} in row {row + 1:,} of {len(rows):,}, "
                "which no model can be meant to read; correct it, or mark it as missing"
            )
        return torch.from_numpy(values.astype(np.float32)).to(self.device)

    @property
    def identity(self) -> str:
        """A hash of what turns rows into forecasts: weights, columns and scales."""
        held = hashlib.sha256(json.dumps([self.model.digest(), list(self.columns)]).encode())
        held.update(np.stack([self.scaler.mean, self.scaler.deviation]).tobytes())
        return held.hexdigest()[:32]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def predict(self, series: Series, origin: int | None = None) -> Series:
        """The `horizon` rows after a series, or after its first `origin` rows. `notes` say what it could not see."""
        origin = len(series) if origin is None else origin
        require(0 <= origin <= len(series), f"origin={origin} is none of the {len(series):,} rows, nor after the last")
        require(
            origin >= self.look_back,
            f"a forecast looks back {self.look_back} rows; there are {origin} before {self._place(series, origin)}: "
            "give more",
        )
        values = self.scaled(series)[origin - self.look_back : origin]
        out = self.model(values.unsqueeze(0))[0][0].cpu().double().numpy()
        times = series.first(origin).after(self.horizon)
        notes = self.unseen(series, origin)
        return Series(list(self.columns), self.scaler.undo(out), times, series.time, series.step, notes=notes)

    def unseen(self, series: Series, origin: int) -> list[str]:
        """A note for every column without any value in the rows that a forecast from row `origin` looks back on."""
        first = origin - self.look_back
        gone = np.isnan(series.choose(self.columns).truth[max(0, first) : origin]).all(0) & (first >= 0)
        return [
            f"{self.columns[index]!r} has no value in the {self.look_back} rows that the forecast looks back on, so "
            "that its forecast is made of filled ones alone (by default one number, repeated)"
            for index in np.flatnonzero(gone)
        ]

    @staticmethod
    def _place(series: Series, origin: int) -> str:
        return "the end" if origin >= len(series) else show_time(series.times[origin])

    def errors(self, series: Series, first: int = 0) -> dict[str, Any]:
        """Scaled errors of all windows whose forecasts lie in rows from `first` on, each from a fresh memory; and
        those of repeating the last value. Values that the table does not hold are no truth; `missing` of `values` to
        forecast are none."""
        rows = slice(max(0, first - self.look_back), None)
        values, truth = self.scaled(series)[rows], self.truth(series)[rows]
        gone = truth[self.look_back :].isnan()
        found, last = (
            window_errors(forecast, values, self.look_back, self.horizon, truth)
            for forecast in (lambda x: self.model(x)[0], lambda x: x[:, -1:].expand(-1, self.horizon, -1))
        )
        repeated = {"mse": last["mse"], "mae": last["mae"]}
        return {**found, "values": gone.numel(), "missing": int(gone.sum()), "last_value": repeated}


def _exported(run: Path) -> Path:
    """RUN/model: the best checkpoint, exported anew where a later one is better."""
    config = read_run(run)
    require(isinstance(config, SeriesRun), f"{run} is no forecasting run (kind {config.kind!r})")
    found = sorted((run / "checkpoints").glob("step-????????/manifest.json"))
    require(bool(found), f"{run} has no complete checkpoint yet")
    target = run / "model"
    stamp = target / BESIDE
    if not stamp.exists() or stamp.stat().st_mtime < max(file.stat().st_mtime for file in found):
        export(run, target, best=_evaluated(config))
    return target


def _evaluated(config: RunConfig) -> bool:
    """Whether the run's split leaves rows to choose the best checkpoint by."""
    assert isinstance(config, SeriesRun)
    return config.data.split[1] > 0


def find_origin(series: Series, at: str) -> int:
    """The row of a time; of a whole date or hour alone, the first row in it."""
    times = series.times
    try:
        asked = np.datetime64(at.strip()) if times.dtype.kind == "M" else int(at)
        require(not (isinstance(asked, np.datetime64) and np.isnat(asked)), "no time")
    except ValueError:
        kind = "a time such as 2024-03-01 or 2024-03-01 18:00" if times.dtype.kind == "M" else "a whole number"
        raise ValueError(f"--at takes {kind}, got {at!r}") from None
    rounded = times.astype(asked.dtype) if isinstance(asked, np.datetime64) else times
    found = np.flatnonzero(rounded == asked)
    require(
        len(found) > 0,
        f"no row at {at}; the table has {show_time(times[0])} … {show_time(times[-1])}, {show_step(series.step)} apart",
    )
    return int(found[0])


def rolling(predictor: Predictor, series: Series, first: int) -> list[tuple[int, Series]]:
    """Forecasts made before row `first` and every `horizon` rows later, with their rows."""
    origins = range(max(first, predictor.look_back), len(series) - predictor.horizon + 1, predictor.horizon)
    return [(origin, predictor.predict(series, origin)) for origin in origins]


def write_rolling(path: Path, made: list[tuple[int, Series]], series: Series) -> None:
    """Forecasts and the truth, one row per time: origin, time, and for every column the forecast and what came, which
    is empty where the table has no value."""
    import csv

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = made[0][1].columns
        writer.writerow(["origin", series.time, *columns, *(f"{name} (truth)" for name in columns)])
        truth = series.choose(columns).truth
        for origin, found in made:
            for row, (time, values) in enumerate(zip(found.times, found.values, strict=True)):
                came = ["" if np.isnan(x) else f"{x:.6g}" for x in truth[origin + row]]
                cells = [*(f"{x:.6g}" for x in values), *came]
                writer.writerow([show_time(series.times[origin]), show_time(time), *cells])
