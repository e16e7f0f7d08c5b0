"""Pictures of forecasts: against the truth, and how errors grow with the distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanmem.data.series import Series
from titanmem.train.plots import new_figure

MOST_COLUMNS = 6


def forecast_figure(series: Series, forecast: Series, origin: int, look_back: int, others: Mapping[str, Series]) -> Any:
    """What was known before row `origin` of a series, what came after where it is there, and forecasts of it. Blank
    where the table has no value. The first columns only, one picture each."""
    columns = forecast.columns[:MOST_COLUMNS]
    across = min(3, len(columns))
    figure, axes = new_figure(across, rows=-(-len(columns) // across), width=5.2, height=2.7)
    past = slice(max(0, origin - 2 * look_back), origin)
    later = slice(origin, origin + len(forecast))
    for axis, column in zip(axes, columns, strict=False):
        values = series.truth[:, series.columns.index(column)]
        _draw(axis, series.times[past], values[past], label="known")
        if len(values[later]):
            _draw(axis, series.times[later], values[later], linestyle=":", label="truth")
        for index, (name, found) in enumerate({"forecast": forecast, **others}.items()):
            place = found.columns.index(column)
            axis.plot(found.times, found.values[:, place], color=f"C{index}", linewidth=1.3, label=name)
        axis.axvline(forecast.times[0], color="0.8", linewidth=0.8)
        axis.set_title(column, fontsize=10)
        axis.tick_params(labelsize=7)
        if series.times.dtype.kind == "M":
            _date_axis(axis)
    for axis in axes[len(columns) :]:
        axis.set_axis_off()
    names = axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper right", ncols=len(names[1]), frameon=False, fontsize=8)
    more = len(forecast.columns) - len(columns)
    if more:
        figure.text(0.995, 0.005, f"and {more} more columns", ha="right", fontsize=8, color="0.4")
    return figure


def _draw(axis: Any, times: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """A grey line with gaps; a value between two gaps, which no line would show, is a dot."""
    gone = np.concatenate([[True], np.isnan(values), [True]])
    alone = np.flatnonzero(~gone[1:-1] & gone[:-2] & gone[2:])
    dots = {"marker": ".", "markersize": 3, "markevery": list(alone)} if len(alone) else {}
    axis.plot(times, values, color="0.35", linewidth=1, **dots, **style)


def _date_axis(axis: Any) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=8)
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def error_figure(by_name: Mapping[str, Sequence[float | None]], title: str) -> Any:
    """Mean squared error against the steps ahead, a line for each name, with gaps where there is none."""
    figure, (axis,) = new_figure(1)
    for name, values in by_name.items():
        axis.plot(np.arange(1, len(values) + 1), np.array(values, dtype=float), label=name)
    axis.set(xlabel="steps ahead", ylabel="MSE, scaled", title=title)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    return figure
