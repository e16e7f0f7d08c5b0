"""Time series from tables: a CSV or Parquet file with a time column and columns of numbers.

What is wrong with a file is said with its line. What is merely imperfect is handled and reported in `Series.notes`:
missing values are filled, absent rows inserted. What was filled is no truth to measure forecasts by: `Series.truth`
leaves it out. Legend: T rows, C columns.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from titanmem.config import require
from titanmem.data.packages import load_package
from titanmem.data.times import find_step, places_of, show_step, show_time, step_times

MISSING = ("last", "linear", "error")
IRREGULAR = ("fill", "keep", "error")
_TIME_NAMES = ("date", "time", "datetime", "timestamp", "date time", "date_time", "ds", "index")
_ABSENT = ("", "na", "n/a", "nan", "null", "none", "-", "?", "<na>")
_MOST = 10  # times as many rows as there are: more would be inserted only by mistake
_LARGEST = 1e100  # of a value: deviations of larger ones overflow
_LARGEST_TIME = 10**18  # of a whole number that is a time: differences of larger ones overflow


@dataclass(frozen=True)
class Series:
    """Columns of numbers in order of time."""

    columns: list[str]
    values: np.ndarray  # [T, C] float64
    times: np.ndarray  # [T] datetime64[us], or whole numbers
    time: str = "row"  # the time column's name
    step: Any = 1  # between rows: timedelta64, Months, or a number
    lines: np.ndarray | None = None  # [T] where each row stands in its file; 0: inserted
    filled: np.ndarray | None = None  # [T, C] whether a value is not the table's own; None: all are
    notes: list[str] = field(default_factory=list)  # what was imperfect, and what was done about it

    def __len__(self) -> int:
        return len(self.values)

    @property
    def truth(self) -> np.ndarray:
        """The values [T, C] that the table holds; NaN where one is missing, be it filled or not."""
        return self.values if self.filled is None else np.where(self.filled, np.nan, self.values)

    def after(self, count: int) -> np.ndarray:
        """The times of the next rows."""
        return step_times(self.times[-1], self.step, np.arange(1, count + 1))

    def first(self, count: int) -> Series:
        """The first rows."""
        lines, filled = (None if x is None else x[:count] for x in (self.lines, self.filled))
        return replace(self, values=self.values[:count], times=self.times[:count], lines=lines, filled=filled)

    def choose(self, columns: Sequence[str]) -> Series:
        """The same rows of some columns, in that order."""
        check_columns(columns, self.columns)
        places = [self.columns.index(column) for column in columns]
        filled = None if self.filled is None else self.filled[:, places]
        return replace(self, columns=list(columns), values=self.values[:, places], filled=filled)


class UnknownColumns(ValueError):
    """Columns were asked for that are not there."""


@dataclass(frozen=True)
class Reading:
    """How a table is read."""

    time: str | None = None  # the time column; default: found; "none": rows are numbered
    columns: tuple[str, ...] | None = None  # default: all others
    time_format: str | None = None  # as for strptime; default: ISO 8601 or numbers
    missing: str = "last"  # last: the value before (the first one after, at the start); linear: between; error
    irregular: str = "fill"  # fill: insert absent rows as missing; keep: rows count as equally spaced; error

    def __post_init__(self) -> None:
        require(self.missing in MISSING, f"missing is one of {', '.join(MISSING)}, got {self.missing!r}")
        require(self.irregular in IRREGULAR, f"irregular is one of {', '.join(IRREGULAR)}, got {self.irregular!r}")


def read_series(path: str | Path, how: Reading | None = None) -> Series:
    """Read, check and complete a table."""
    how = how or Reading()
    return fill_missing(read_rows(path, how), how.missing, str(path))


def read_rows(path: str | Path, how: Reading | None = None) -> Series:
    """The same with missing values left as NaN. The last few files are remembered."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no table at {file}; expected a .csv or .parquet file")
    about = file.stat()
    return _read(file.resolve(), how or Reading(), about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _read(file: Path, how: Reading, *_: int) -> Series:
    raw = _read_parquet(file, how) if file.suffix.lower() in (".parquet", ".pq") else _read_csv(file, how)
    notes = _check_order(file, raw, how.irregular == "keep")
    return complete_rows(replace(raw, notes=[*raw.notes, *notes]), how.irregular, str(file))


# -- files --------------------------------------------------------------------------------------------------------


def _read_csv(file: Path, how: Reading) -> Series:
    text, notes = _decode(file)
    head = text[: text.find("\n")] if "\n" in text else text
    mark = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    names = [name.strip() for name in next(reader, [])]
    require(len(names) > 0, f"{file} is empty; expected a header with column names and rows of numbers")
    _check_names(f"{file}, line 1", names)
    rows = _rows(file, reader, len(names))
    first = next(rows, None)
    require(first is not None, f"{file} has a header and no rows")
    assert first is not None
    time = _find_time(file, how, names, first[1])
    columns = _find_columns(file, how, names, time)
    places = [names.index(column) for column in columns]
    values: list[list[float]] = []
    times: list[Any] = []
    lines: list[int] = []
    for line, cells in _chain(first, rows):
        try:
            values.append([float(cells[place]) for place in places])
        except ValueError:
            values.append([_number(file, line, columns[i], cells[place]) for i, place in enumerate(places)])
        times.append(len(times) if time is None else _time(file, line, time, cells[names.index(time)], how))
        lines.append(line)
    return _made(file, columns, np.array(values), times, time, np.array(lines), notes)


def _rows(file: Path, reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the line it begins in."""
    line = reader.line_num + 1
    try:
        for cells in reader:
            if cells and len(cells) != width:
                open_ended = f"; it goes on to line {reader.line_num}: close the quotation mark that begins a cell"
                raise ValueError(
                    f"{file}, line {line}: {len(cells)} cells, but the header has {width} columns"
                    + (open_ended if reader.line_num > line else "")
                )
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {line}: this is no row of a table ({error}); a quotation mark may be missing"
        ) from error


def _check_names(where: str, names: Sequence[str]) -> None:
    twice = _repeated(names)
    require(not twice, f"{where}: several columns are called {twice}; rename them")


def _repeated(names: Sequence[str]) -> str:
    return ", ".join(sorted({repr(name) for name in names if names.count(name) > 1}))


def _chain(first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest


def _decode(file: Path) -> tuple[str, list[str]]:
    data = file.read_bytes()
    require(
        b"\0" not in data,
        f"{file}, line {data.count(10, 0, data.find(0)) + 1}: a zero byte, so this is no text in UTF-8 or Latin-1; "
        "save the table as CSV in UTF-8",
    )
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        return data.decode("latin-1"), ["it is not UTF-8; read as Latin-1"]


def _read_parquet(file: Path, how: Reading) -> Series:
    parquet = load_package("pyarrow.parquet", "reading Parquet", "forecast")
    names = list(parquet.read_schema(file).names)
    _check_names(str(file), names)
    table = parquet.read_table(file)
    require(table.num_rows > 0, f"{file} has no rows")
    time = _find_time(file, how, names, [str(column[0].as_py()) for column in table.columns])
    columns = _find_columns(file, how, names, time)
    found = [_parquet_column(file, column, table.column(column)) for column in columns]
    lines = np.arange(1, table.num_rows + 1)
    times: list[Any] = list(range(table.num_rows))
    if time is not None:
        cells = table.column(time).to_pylist()
        times = [_time(file, int(line), time, cell, how) for line, cell in zip(lines, cells, strict=True)]
    return _made(file, columns, np.stack(found, 1).astype(np.float64), times, time, lines, [])


def _parquet_column(file: Path, name: str, held: Any) -> np.ndarray:
    """Numbers, or words that are numbers. Whole numbers beyond 2^53 are rounded, as those of a CSV are."""
    if str(held.type) in ("string", "large_string", "string_view"):
        cells = enumerate(held.to_pylist(), 1)
        return np.array([_number(file, row, name, cell or "") for row, cell in cells])
    try:
        numbers: np.ndarray = held.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's own errors are among these
        raise ValueError(
            f"{file}: column {name!r} holds {held.type}, not numbers; leave it out with --columns"
        ) from error
    return numbers


def _made(
    file: Path, columns: list[str], values: np.ndarray, times: list[Any], time: str | None, lines: np.ndarray,
    notes: list[str],
) -> Series:  # fmt: skip
    endless = np.argwhere(np.abs(values) > _LARGEST)
    if len(endless):
        row, column = endless[0]
        raise ValueError(
            f"{file}, line {lines[row]}, column {columns[column]!r}: an infinite value, or one beyond {_LARGEST:g}; "
            "correct it, or leave the cell empty"
        )
    kinds = [_kind(t) for t in times]
    other = next((row for row, kind in enumerate(kinds) if kind != kinds[0]), 0)
    require(
        other == 0,
        f"{file}, line {lines[other]}, column {time!r}: {kinds[other]}, but {kinds[0]} in line {lines[0]}; write all "
        "of them in one way",
    )
    dated = isinstance(times[0], datetime)
    made = np.array([t.replace(tzinfo=None) for t in times], dtype="datetime64[us]") if dated else np.array(times)
    return Series(columns, values, made, time or "row", lines=lines, notes=notes)


def _kind(time: Any) -> str:
    if not isinstance(time, datetime):
        return "a number"
    return "a time without a zone" if time.tzinfo is None else "a time with a zone"


def _find_time(file: Path, how: Reading, names: Sequence[str], cells: Sequence[str]) -> str | None:
    """The time column: the named one, one with a usual name, or the first whose cells are dates."""
    if how.time is not None:
        if how.time.lower() == "none":
            return None
        require(
            how.time in names, f"{file} has no column {how.time!r} to be the time; its columns are {', '.join(names)}"
        )
        return how.time
    for name in names:
        if name.lower() in _TIME_NAMES:
            return name
    for name, cell in zip(names, cells, strict=False):
        try:
            float(cell)
        except ValueError:
            try:
                datetime.fromisoformat(cell.strip())
            except ValueError:
                continue
            return name
    raise ValueError(
        f"{file}: no time column found among {', '.join(names)}; name it with --time COLUMN (and --time-format where "
        "it is not ISO), or number the rows with --time none"
    )


def _find_columns(file: Path, how: Reading, names: Sequence[str], time: str | None) -> list[str]:
    rest = [name for name in names if name != time]
    chosen = rest if how.columns is None else list(how.columns)
    check_columns(chosen, rest, f"{file}: ")
    require(bool(chosen), f"{file} has no column besides the time {time!r}")
    return chosen


def check_columns(chosen: Sequence[str], there: Sequence[str], where: str = "") -> None:
    """Raise for columns that are not there or chosen twice; the message begins with `where`."""
    absent = [name for name in chosen if name not in there]
    if absent:
        raise UnknownColumns(f"{where}no column {', '.join(map(repr, absent))}; there are {', '.join(map(str, there))}")
    twice = _repeated(chosen)
    require(not twice, f"{where}the columns are named twice: {twice}; name each once")


def _number(file: Path, line: int, column: str, cell: str) -> float:
    word = cell.strip().lower()
    if word in _ABSENT:
        return float("nan")
    try:
        return float(word)
    except ValueError:
        hint = "; decimal commas are not read, write points" if word.replace(",", "", 1).lstrip("-").isdigit() else ""
        raise ValueError(
            f"{file}, line {line}, column {column!r}: {cell!r} is not a number{hint}; correct it, or leave the column "
            "out with --columns"
        ) from None


def _time(file: Path, line: int, name: str, cell: Any, how: Reading) -> Any:
    """A datetime (in UTC where the text has a zone), or a number."""
    try:
        if isinstance(cell, str):
            cell = cell.strip()
            if how.time_format is not None:
                cell = datetime.strptime(cell, how.time_format)
            elif cell.lstrip("-").isdigit() and not (len(cell) == 8 and cell[:2] in ("19", "20")):
                cell = int(cell)
            else:
                cell = datetime.fromisoformat(cell)
        if isinstance(cell, int):
            require(abs(cell) < _LARGEST_TIME, "too large")
            return cell
        cell = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
        return cell if cell.tzinfo is None else cell.astimezone(UTC)
    except (ValueError, AttributeError):
        iso = "ISO 8601 (2024-01-31 18:00) or a whole number of at most 18 digits"
        expected = f"the format {how.time_format!r}" if how.time_format else iso
        raise ValueError(
            f"{file}, line {line}, column {name!r}: {cell!r} is no time; expected {expected}"
            + ("" if how.time_format else "; give other formats with --time-format, for instance '%d.%m.%Y %H:%M'")
        ) from None


def _check_order(file: Path, series: Series, keep: bool) -> list[str]:
    """Times rise strictly; with `keep` a repeated one is only noted."""
    assert series.lines is not None
    earlier = np.flatnonzero(series.times[1:] < series.times[:-1])
    if len(earlier):
        row = int(earlier[0]) + 1
        raise ValueError(
            f"{file}, line {series.lines[row]}: the time {show_time(series.times[row])} is earlier than "
            f"{show_time(series.times[row - 1])} in line {series.lines[row - 1]} ({len(earlier):,} such rows in all); "
            "sort the rows by time, and keep one series per file"
        )
    same = np.flatnonzero(series.times[1:] == series.times[:-1])
    if not len(same):
        return []
    row = int(same[0]) + 1
    text = f"the time {show_time(series.times[row])} stands in line {series.lines[row - 1]} too"
    if keep:
        return [f"line {series.lines[row]}: {text} ({len(same):,} repeated times in all); kept"]
    raise ValueError(
        f"{file}, line {series.lines[row]}: {text} ({len(same):,} repeated times in all); remove duplicates, keep one "
        "series per file, or take all rows as they stand with --irregular keep"
    )


# -- absent rows --------------------------------------------------------------------------------------------------


def complete_rows(series: Series, how: str, name: str) -> Series:
    """Find the step; insert absent rows, which are missing values."""
    step = find_step(series.times)
    series = replace(series, step=step)
    if len(series) < 2:
        return series
    regular = step_times(series.times[0], step, np.arange(len(series)))
    if np.array_equal(regular, series.times):
        return series
    assert series.lines is not None
    first = int(np.flatnonzero(regular != series.times)[0])
    where = f"first at line {series.lines[first]}, {show_time(series.times[first])}"
    text = f"rows are not {show_step(step)} apart everywhere ({where})"
    if how == "keep":
        return replace(series, notes=[*series.notes, f"{text}; kept as if they were"])
    if how == "error":
        raise ValueError(f"{name}: {text}; give --irregular fill or --irregular keep")
    places = places_of(series.times, step)
    if places is None:
        raise ValueError(
            f"{name}: {text}, and some fall between steps, so that absent rows cannot be inserted; resample the "
            "table, or take rows as equally spaced with --irregular keep"
        )
    total = int(places[-1]) + 1
    absent = total - len(series)
    if total > _MOST * len(series):
        raise ValueError(
            f"{name}: {text}; {absent:,} rows would have to be inserted between {len(series):,}. Correct the times, "
            "or take rows as equally spaced with --irregular keep"
        )
    values = np.full((total, len(series.columns)), np.nan)
    values[places] = series.values
    lines = np.zeros(total, dtype=np.int64)
    lines[places] = series.lines
    times = step_times(series.times[0], step, np.arange(total))
    note = f"{text}; {absent:,} absent rows inserted as missing values ({absent / total:.1%} of all)"
    return replace(series, values=values, times=times, lines=lines, notes=[*series.notes, note])


# -- missing values -----------------------------------------------------------------------------------------------


def fill_missing(series: Series, how: str, name: str) -> Series:
    """The series without gaps, marking what was filled, and with a note per column that had some."""
    absent = np.isnan(series.values)
    if not absent.any():
        return series
    values, notes = series.values.copy(), list(series.notes)
    for index in np.flatnonzero(absent.any(0)):
        gone, column = absent[:, index], series.columns[index]
        where = f"{int(gone.sum()):,} of {len(gone):,} values of {column!r} are missing"
        row = int(np.flatnonzero(gone)[0])
        if series.lines is not None and series.lines[row]:
            where += f", first in line {series.lines[row]}"
        require(not gone.all(), f"{name}: column {column!r} holds no number; leave it out with --columns")
        require(how != "error", f"{name}: {where}; give --missing last or --missing linear")
        there = np.flatnonzero(~gone)
        if how == "linear":
            values[gone, index] = np.interp(np.flatnonzero(gone), there, values[there, index])
            ends = ", at an end with the nearest value" if gone[0] or gone[-1] else ""
            notes.append(f"{where}; filled along straight lines between their neighbours{ends}")
        else:
            before = np.maximum.accumulate(np.where(gone, -1, np.arange(len(gone))))
            values[:, index] = values[np.where(before < 0, there[0], before), index]
            notes.append(f"{where}; {_carried(int(gone.sum()), int(there[0]))}")
    return replace(series, values=values, filled=absent, notes=notes)


def _carried(gone: int, leading: int) -> str:
    """What `last` fills `gone` missing values with, of which `leading` have no value before them."""
    if leading == gone:
        return "each takes the value after it"
    first = "the first one the value after it" if leading == 1 else f"the first {leading:,} the value after them"
    return "each takes the value before it" + (f", {first}" if leading else "")


def fill_parts(series: Series, train: int, how: str, name: str) -> Series:
    """The same, with the first `train` rows filled from themselves alone: what is learnt from them knows nothing of
    what follows."""
    part = series.first(train)
    empty = [column for column, gone in zip(part.columns, np.isnan(part.values).all(0), strict=True) if gone]
    whole = fill_missing(series, how, name)
    require(
        train == 0 or not empty,
        f"{name}: {', '.join(map(repr, empty))} has no number in the {train:,} rows to train on; leave the column out "
        "with --columns, or train on more rows with --split",
    )
    mine = fill_missing(part, how, name).values
    if np.array_equal(mine, whole.values[:train]):
        return whole
    note = "a gap across the end of the training part keeps the value before it there"
    return replace(whole, values=np.concatenate([mine, whole.values[train:]]), notes=[*whole.notes, note])


def write_series(path: str | Path, series: Series) -> None:
    """A CSV that `read_series` reads back as it was."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    with aside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([series.time, *series.columns])
        for time, row in zip(series.times, series.values, strict=True):
            writer.writerow([show_time(time), *(repr(float(value)) for value in row)])
    aside.replace(target)
