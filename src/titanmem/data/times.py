"""Times of rows and the step between them: datetime64[us] or whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from titanmem.config import require

_DAY, _MONTH = np.timedelta64(1, "D"), np.timedelta64(28, "D")
_UNITS = {"day": 86_400_000_000, "hour": 3_600_000_000, "minute": 60_000_000}  # microseconds


@dataclass(frozen=True)
class Months:
    """A step of whole months. `end`: rows stand on the last day of a month."""

    count: int
    end: bool = False


def show_time(value: Any) -> str:
    """A time as it is written into tables."""
    if not isinstance(value, np.datetime64):
        return str(value)
    text = str(value.astype("datetime64[us]")).replace("T", " ")
    return text[:19] if text.endswith(".000000") else text


def find_step(times: np.ndarray) -> Any:
    """The most common distance of rows; whole months where all rows stand at the same time of a month, or on its last
    day."""
    if len(times) < 2:
        return np.timedelta64(1, "D") if times.dtype.kind == "M" else 1
    if times.dtype.kind == "M":
        months = times.astype("datetime64[M]")
        apart = int(_commonest(np.diff(months.astype(np.int64))))
        if np.diff(times).min() >= _MONTH:
            left = (months + 1).astype(times.dtype) - times  # of the month
            if len(np.unique(left)) == 1 and left[0] <= _DAY:
                return Months(apart, end=True)
            if len(np.unique(times - months.astype(times.dtype))) == 1:
                return Months(apart)
        return np.timedelta64(int(_commonest(np.diff(times).astype(np.int64))), "us")
    return _commonest(np.diff(times)).item()


def _commonest(values: np.ndarray) -> Any:
    found, counts = np.unique(values, return_counts=True)
    return found[counts.argmax()]


def step_times(start: Any, step: Any, count: np.ndarray) -> np.ndarray:
    """start + count · step, also by months."""
    if isinstance(step, Months):
        month = start.astype("datetime64[M]") + int(step.end)  # the border that rows keep their distance from
        rest = start - month.astype(start.dtype)
        return (month + count * step.count).astype(start.dtype) + rest
    return start + count * step


def places_of(times: np.ndarray, step: Any) -> np.ndarray | None:
    """The number of steps of every row from the first; None if some fall between."""
    if isinstance(step, Months):
        month = times.astype("datetime64[M]").astype(np.int64)
        apart, size = month - month[0], np.int64(step.count)
    else:
        apart = (times - times[0]).astype(np.int64) if times.dtype.kind == "M" else times - times[0]
        size = step.astype(np.int64) if isinstance(step, np.timedelta64) else step
    return None if (apart % size).any() else (apart // size).astype(np.int64)


def show_step(step: Any) -> str:
    """A step in words. Those of months tell only whether it is their last day."""
    if isinstance(step, Months):
        return f"{step.count} month{'s' if step.count > 1 else ''}{', on the last day' if step.end else ''}"
    if not isinstance(step, np.timedelta64):
        return str(step)
    micros = int(step.astype("timedelta64[us]").astype(np.int64))
    for name, size in _UNITS.items():
        if micros >= size and micros % size == 0:
            count = micros // size
            return f"{count} {name}{'s' if count > 1 else ''}"
    return f"{micros / 1e6:.15g} s"


def parse_step(text: str, time: Any) -> Any:
    """The step that `show_step` shows so, of rows like one at `time`."""
    count, _, unit = text.partition(" ")
    dated = isinstance(time, np.datetime64)
    require(
        dated == bool(unit),
        f"the time {show_time(time)} is {'a date' if dated else 'a number'}, but rows are {text} apart",
    )
    if unit.startswith("month"):
        return Months(int(count), end="last day" in unit)
    if unit:
        size = _UNITS.get(unit.removesuffix("s"), 1_000_000)
        return np.timedelta64(round(float(count) * size), "us")
    return float(count) if "." in count else int(count)
