"""Online forecasting: rows come one by one, the memory goes on learning, and a forecast can be had at any time.

    rows   | 0 … L−1 | L … 2L−1 | 2L …          t |          the stream, cut into windows of L = look_back rows
                                    |← look-back →| forecast
            read into the memory    ↑ the last border that leaves a whole look-back

The memory has read every whole window up to that border, each once and normalised by itself, as in training on chains
of windows. A forecast reads the look-back window with that memory and changes nothing. So what is forecast depends on
the stream alone, not on how it was cut into calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanmem.config import require
from titanmem.data.series import Series, check_columns
from titanmem.data.times import show_step, show_time, step_times
from titanmem.forecast.predictor import Predictor
from titanmem.models.series import Forecaster, SeriesConfig
from titanmem.state import ModelState, State, check_same_config
from titanmem.train.series import MOST_ROWS, check_truth, differences

ANEW = "start a new stream: give another --state, or delete the stream's file"


@dataclass(frozen=True)
class StreamState(State):
    """Everything an OnlineForecaster knows about its stream."""

    recent: Tensor  # [C, n] scaled rows since the last window that was read into the memory
    model: ModelState | None  # None: no window was read yet
    seen: int = 0  # rows of the stream
    last: str | None = None  # the newest row's time
    repeats: int = 1  # rows in a row that had it
    config: dict[str, Any] | None = None
    identity: str | None = None  # of the weights and scales that read it


class OnlineForecaster:
    """A forecaster that reads a stream.

    >>> online = OnlineForecaster(Predictor.open("runs/power"))
    >>> online.feed(rows)                 # [n, C] in the table's units, n ≥ 0
    >>> online.forecast()                 # [horizon, C]
    >>> online.save("power.safetensors"); online = OnlineForecaster.resume(predictor, "power.safetensors")
    """

    def __init__(self, predictor: Predictor, state: StreamState | None = None) -> None:
        config, identity = predictor.model.config, predictor.identity
        check_memory(config)
        self.predictor = predictor
        if state is None:
            empty = torch.zeros(len(predictor.columns), 0, device=predictor.device)
            state = StreamState(empty, None, config=config.to_dict(), identity=identity)
        check_same_config(config.to_dict(), config.completed(state.config), "go on", "stream")
        require(
            state.identity == identity,
            "the stream was read by another model: its weights, columns or scales are not those of this one, so its "
            f"memory means something else; go on with the model that began it, or {ANEW}",
        )
        self.state = state.to(predictor.device)

    @staticmethod
    def resume(predictor: Predictor, path: str | Path) -> OnlineForecaster:
        """Go on from what `save` wrote."""
        return OnlineForecaster(predictor, StreamState.load(path))

    def save(self, path: str | Path) -> None:
        """The whole stream so far in one file of bounded size."""
        self.state.save(path)

    @property
    def ready(self) -> bool:
        """Whether a whole look-back window was seen."""
        return self.state.recent.shape[1] >= self.predictor.look_back

    @torch.no_grad()
    def feed(self, rows: Any, last: str | None = None) -> None:
        """Read rows [n, C], or one row [C], of which `last` is the newest one's time. What has names, such as a
        DataFrame, is read by them. A missing value (NaN) takes the one before; the first ones, the mean."""
        columns = self.predictor.columns
        names = rows.keys() if hasattr(rows, "keys") else getattr(rows, "columns", None)
        if names is not None:
            with self.predictor.naming_columns():
                check_columns(columns, list(names))
            rows = np.stack([np.asarray(rows[name], dtype=np.float64) for name in columns], -1)
        given = np.atleast_2d(np.asarray(rows, dtype=np.float64))
        require(
            given.ndim == 2 and given.shape[1] == len(columns),
            f"rows must have the columns {', '.join(columns)}: [rows, {len(columns)}], got {list(given.shape)}",
        )
        state = self.state
        recent = fill_forward(torch.cat([state.recent, self.predictor.scale(given).T], 1))
        model, length = state.model, self.predictor.look_back
        while recent.shape[1] >= 2 * length:
            _, model = self.predictor.model(recent[:, :length].T.unsqueeze(0), state=model)
            recent = recent[:, length:]
        state = replace(state, recent=recent, model=model, seen=state.seen + len(given))
        self.state = replace(state, last=last, repeats=1) if len(given) else state

    def feed_new(self, series: Series) -> int:
        """Read the rows of a table that are newer than what was read; returns how many. The table holds the last row
        that was read, or begins right after it. Of several rows with that time, those are new that were not there."""
        times = [show_time(time) for time in series.times]
        last, first = self.state.last, 0
        require(
            last is not None or self.state.seen == 0,
            f"{self.state.seen:,} rows were fed without their times, so it is unknown which rows are new; feed them",
        )
        if last in times:
            first = times.index(last) + min(times.count(last), self.state.repeats)
        elif last is not None:
            before = show_time(step_times(series.times[0], series.step, np.array([-1]))[0])
            require(
                last == before,
                f"the stream stopped at {last}, which the table neither holds nor follows on ({times[0]} … "
                f"{times[-1]}, {show_step(series.step)} apart); give a table that goes on from there, or {ANEW}",
            )
        if first < len(times):
            repeats = times[first:].count(times[-1]) + (self.state.repeats if times[-1] == last else 0)
            self.feed(series.choose(self.predictor.columns).values[first:], times[-1])
            self.state = replace(self.state, repeats=repeats)
        return len(times) - first

    @torch.no_grad()
    def forecast(self) -> np.ndarray:
        """The next `horizon` rows [H, C] in the table's units."""
        require(
            self.ready,
            f"a forecast looks back {self.predictor.look_back} rows; {self.state.seen} were read: feed more first",
        )
        window = self.state.recent[:, -self.predictor.look_back :].T.unsqueeze(0)
        out = self.predictor.model(window, state=self.state.model)[0][0]
        return self.predictor.scaler.undo(out.cpu().double().numpy())


def check_memory(config: SeriesConfig) -> None:
    """Refuse models that have nothing to carry along a stream."""
    require(
        config.learns_online,
        f"{config.mixer} has no memory that goes on from window to window; train lmm, mac, mag or mal",
    )


def fill_forward(rows: Tensor) -> Tensor:
    """rows [C, n] with missing values replaced by the last that was there; 0, the mean, where there was none."""
    gone = rows.isnan()
    if not bool(gone.any()):
        return rows
    place = torch.arange(rows.shape[1], device=rows.device).expand_as(rows).masked_fill(gone, -1).cummax(1).values
    return torch.where(place >= 0, rows.gather(1, place.clamp(min=0)), 0)


@torch.no_grad()
def online_errors(model: Forecaster, values: Tensor, first: int) -> dict[str, Any]:
    """Errors of the forecasts that an OnlineForecaster makes before every row from `first` on, reading scaled values
    [T, C] from their start: what `window_errors` measures with a fresh memory. NaN is read as the stream fills it, and
    is no truth."""
    c, truth, values = model.config, values, fill_forward(values.T).T
    length, channels = c.look_back, values.shape[1]
    squares = sizes = total = 0.0
    count, state = 0, None
    for begin in range(0, len(values), length):  # the memory has read all before `begin`
        start, stop = max(first, begin + length), min(begin + 2 * length, len(values) - c.horizon + 1)
        origins = torch.arange(start, max(start, stop))
        for part in origins.split(max(1, MOST_ROWS // channels)) if len(origins) else ():
            index = (part.unsqueeze(1) + torch.arange(-length, c.horizon)).to(values.device)
            rows, wanted = values[index], truth[index[:, length:]]
            held = None if state is None else state.rows(torch.arange(len(part) * channels) % channels)
            difference, known = differences(model(rows[:, :length], state=held)[0], wanted)
            squares += difference.square().sum().item()
            sizes += difference.abs().sum().item()
            total += known.sum().item()
            count += len(part)
        if begin + length <= len(values):
            state = model(values[begin : begin + length].unsqueeze(0), state=state)[1]
    check_truth(total)
    return {"mse": squares / total, "mae": sizes / total, "windows": count}
