"""Tables of time series: what is read, what is filled, what is refused and where it stands; splits and scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titanmem.data.series import Reading, Series, read_series, write_series
from titanmem.data.splits import PARTS, Scaler, Splits, find_benchmark, read_benchmark
from titanmem.data.times import Months, parse_step, show_step, show_time

DATA = Path(__file__).parents[2] / "data"  # where the docs put the data sets; not part of the project


def write(folder: Path, text: str, name: str = "t.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


HOURS = "date,a,b\n2024-01-01 00:00,1,10\n2024-01-01 01:00,2,20\n2024-01-01 02:00,3,30\n"


def test_columns_times_and_step_are_found(tmp_path):
    found = read_series(write(tmp_path, HOURS))
    assert (found.columns, found.time, show_step(found.step)) == (["a", "b"], "date", "1 hour")
    np.testing.assert_array_equal(found.values, [[1, 10], [2, 20], [3, 30]])
    assert [show_time(t) for t in found.after(2)] == ["2024-01-01 03:00:00", "2024-01-01 04:00:00"]
    assert found.notes == []


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("when;a\n01.02.2024 13:00;1\n01.02.2024 14:00;2\n", Reading(time="when", time_format="%d.%m.%Y %H:%M")),
        ("a,when\n1,2024-02-01T13:00:00Z\n2,2024-02-01T15:00:00+01:00\n", Reading()),
        ("when\ta\n\n2024-02-01 13:00\t1\n2024-02-01 14:00\t2\n", Reading()),
    ],
)
def test_other_formats_of_times_and_cells_are_read(tmp_path, text, how):
    found = read_series(write(tmp_path, text), how)
    assert [show_time(t) for t in found.times] == ["2024-02-01 13:00:00", "2024-02-01 14:00:00"]
    np.testing.assert_array_equal(found.values, [[1], [2]])


def test_a_latin_1_header_is_read_and_said(tmp_path):
    found = read_series(write(tmp_path, HOURS.replace(",a,", ",W/m²,"), encoding="latin-1"))
    assert found.columns == ["W/m²", "b"]
    assert found.notes == ["it is not UTF-8; read as Latin-1"]


def test_months_are_steps_of_their_own(tmp_path):
    found = read_series(write(tmp_path, "ds,y\n2023-11-30,1\n2023-12-30,2\n2024-01-30,3\n"))
    assert show_step(found.step) == "1 month"
    one = read_series(write(tmp_path, "ds,y\n2023-12-01,1\n2024-01-01,2\n2024-02-01,3\n2024-05-01,4\n", "m.csv"))
    assert [show_time(t)[:10] for t in one.times[3:]] == ["2024-03-01", "2024-04-01", "2024-05-01"]
    assert [show_time(t)[:10] for t in one.after(1)] == ["2024-06-01"]


def test_month_ends_are_steps_of_a_month(tmp_path):
    days = ["2023-10-31", "2023-11-30", "2023-12-31", "2024-02-29"]
    found = read_series(write(tmp_path, "ds,y\n" + "".join(f"{day},1\n" for day in days)))
    assert show_step(found.step) == "1 month, on the last day"
    assert [show_time(t)[:10] for t in found.times[3:]] == ["2024-01-31", "2024-02-29"]
    assert [show_time(t)[:10] for t in found.after(3)] == ["2024-03-31", "2024-04-30", "2024-05-31"]


@pytest.mark.parametrize(
    ("step", "time"),
    [
        (Months(3), "2024-02-15"),
        (Months(1), "2023-02-28"),  # the last day by chance
        (Months(1, end=True), "2024-04-30"),
        (np.timedelta64(36, "h"), "2024-01-01"),
        (np.timedelta64(90_000_001, "us"), "2024-01-01"),
    ],
)
def test_a_step_is_read_from_its_words(step, time):
    assert parse_step(show_step(step), np.datetime64(time, "us")) == step
    assert parse_step("7", 3) == 7
    with pytest.raises(ValueError, match=r"the time 3 is a number, but rows are .* apart"):
        parse_step(show_step(step), 3)


def test_missing_values_are_filled_as_asked_and_reported(tmp_path):
    rows = [(1, ""), (2, "2"), (3, "NA"), (4, "nan"), (5, "8"), (6, "")]
    path = write(tmp_path, "t,a\n" + "".join(f"2024-01-0{day},{cell}\n" for day, cell in rows))
    last, linear = (read_series(path, Reading(missing=how)) for how in ("last", "linear"))
    np.testing.assert_array_equal(last.values[:, 0], [2, 2, 2, 2, 8, 8])
    np.testing.assert_array_equal(linear.values[:, 0], [2, 2, 4, 6, 8, 8])
    where = "4 of 6 values of 'a' are missing, first in line 2; "
    assert last.notes == [where + "each takes the value before it, the first one the value after it"]
    assert linear.notes == [
        where + "filled along straight lines between their neighbours, at an end with the nearest value"
    ]
    np.testing.assert_array_equal(last.truth[:, 0], [np.nan, 2, np.nan, np.nan, 8, np.nan])
    with pytest.raises(ValueError, match=r"4 of 6 values of 'a' are missing, first in line 2; give --missing last"):
        read_series(path, Reading(missing="error"))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("1,,3", "each takes the value before it"),
        (",,3", "each takes the value after it"),
        (",,3,", "each takes the value before it, the first 2 the value after them"),
    ],
)
def test_a_note_says_which_value_a_missing_one_takes(tmp_path, cells, said):
    rows = [f"{row},{cell},0" for row, cell in enumerate(cells.split(","))]
    (note,) = read_series(write(tmp_path, "\n".join(["t,a,b", *rows])), Reading(time="t")).notes
    assert note.endswith(f"; {said}")


def test_what_was_filled_or_inserted_is_no_truth(tmp_path):
    found = read_series(write(tmp_path, HOURS + "2024-01-01 05:00,,60\n"))
    truth = [[1, 10], [2, 20], [3, 30], [np.nan, np.nan], [np.nan, np.nan], [np.nan, 60]]
    np.testing.assert_array_equal(found.truth, truth)
    np.testing.assert_array_equal(found.choose(["b"]).first(4).truth, np.array(truth)[:4, 1:])
    assert not np.isnan(found.values).any()


def test_absent_rows_are_inserted_kept_or_refused(tmp_path):
    path = write(tmp_path, HOURS + "2024-01-01 05:00,6,60\n")
    filled, kept = read_series(path), read_series(path, Reading(irregular="keep"))
    assert [show_time(t)[11:13] for t in filled.times] == ["00", "01", "02", "03", "04", "05"]
    np.testing.assert_array_equal(filled.values[:, 0], [1, 2, 3, 3, 3, 6])
    assert "2 absent rows inserted" in filled.notes[0]
    assert "first at line 5, 2024-01-01 05:00:00" in filled.notes[0]
    assert (len(kept), kept.notes[0][-20:]) == (4, "kept as if they were")
    with pytest.raises(ValueError, match=r"not 1 hour apart everywhere .* give --irregular fill"):
        read_series(path, Reading(irregular="error"))
    with pytest.raises(ValueError, match="some fall between steps"):
        read_series(write(tmp_path, HOURS + "2024-01-01 03:30,6,60\n", "between.csv"))
    with pytest.raises(ValueError, match="rows would have to be inserted between 4"):
        read_series(write(tmp_path, HOURS + "2034-01-01 03:00,6,60\n", "decade.csv"))


@pytest.mark.parametrize(
    ("text", "how", "error"),
    [
        ("", {}, "is empty"),
        ("date,a\n", {}, "a header and no rows"),
        (HOURS + "2024-01-01 03:00,x,40\n", {}, r"line 5, column 'a': 'x' is not a number.*--columns"),
        (HOURS + '2024-01-01 03:00,"4,5",40\n', {}, r"line 5, column 'a': '4,5' is not a number; decimal commas"),
        (HOURS + "2024-01-01 03:00,4\n", {}, "line 5: 2 cells, but the header has 3 columns"),
        (HOURS + '2024-01-01 03:00,"4,40\n2024-01-01 04:00,5,50\n', {}, "line 5: 2 cells, .* goes on to line 6: close"),
        (HOURS + '2024-01-01 03:00,"4,40\n' + 9999 * "2024-01-01 04:00,5\n", {}, "line 5: .*quotation mark"),
        (HOURS + "\0\n", {}, "line 5: a zero byte"),
        (HOURS.encode("utf-16").decode("latin-1"), {}, "line 1: a zero byte, .* save the table as CSV in UTF-8"),
        (HOURS + "2024-01-01 03:00Z,4,40\n", {}, "line 5, column 'date': a time with a zone, but a time without .* 2"),
        (HOURS + "7,4,40\n", {}, "line 5, column 'date': a number, but a time without a zone in line 2"),
        (HOURS + "2024-01-01 03:00,inf,4\n", {}, "line 5, column 'a': an infinite value"),
        (HOURS + "2024-01-01 03:00,1e200,4\n", {}, "line 5, column 'a': .* beyond 1e.100"),
        (HOURS + "2024-01-01 02:00,4,40\n", {}, "line 5: the time 2024-01-01 02:00:00 stands in line 4 too"),
        (HOURS + "2023-12-31 02:00,4,40\n", {}, "line 5: the time 2023-12-31 02:00:00 is earlier than .* in line 4"),
        (HOURS + "tomorrow,4,40\n", {}, r"line 5, column 'date': 'tomorrow' is no time; expected ISO"),
        (HOURS, {"time": "when"}, r"no column 'when' to be the time; its columns are date, a, b"),
        (HOURS, {"columns": ("a", "c")}, r"no column 'c'; there are a, b"),
        (HOURS, {"columns": ("a", "b", "a")}, r"the columns are named twice: 'a'; name each once"),
        (f"time,a\n{10**22},1\n{10**22 + 1},2\n", {}, "line 2, column 'time': 1.* is no time; expected .* 18 digits"),
        ("a,b\n1,2\n", {}, "no time column found among a, b; name it with --time"),
        ("date,a,a\n2024-01-01,1,2\n", {}, "several columns are called 'a'"),
        ("date,a,b\n2024-01-01,,1\n2024-01-02,,1\n", {}, "column 'a' holds no number"),
        (HOURS, {"missing": "zero"}, "missing is one of last, linear, error"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, how, error):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=error):
        read_series(path, Reading(**how))


def test_repeated_times_are_kept_on_request_only(tmp_path):
    path = write(tmp_path, HOURS + "2024-01-01 02:00,4,40\n")
    found = read_series(path, Reading(irregular="keep"))
    assert len(found) == 4
    assert "1 repeated times in all); kept" in found.notes[0]


def test_a_written_series_is_read_back_exactly(tmp_path):
    values = np.random.default_rng(0).normal(size=(5, 2))
    times = np.datetime64("2024-02-27", "us") + np.arange(5) * np.timedelta64(1, "D")
    write_series(tmp_path / "s.csv", Series(["a", "b"], values, times, "day"))
    found = read_series(tmp_path / "s.csv", Reading(time="day"))
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.times, times)


def test_parquet_is_read_like_csv(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    read = read_series(write(tmp_path, HOURS))
    times = arrow.array(read.times)
    table = {"date": times, "a": [1.0, None, 3.0], "b": [10, 20, 30]}
    parquet.write_table(arrow.table(table), tmp_path / "T.PARQUET")
    found = read_series(tmp_path / "T.PARQUET")
    np.testing.assert_array_equal(found.values, [[1, 10], [1, 20], [3, 30]])
    np.testing.assert_array_equal(found.times, read.times)
    for cells, error in (
        (["1", None, "z"], "line 3, column 'a': 'z' is not a number"),
        ([[1], [2], [3]], "column 'a' holds list<.*>, not numbers"),
    ):
        parquet.write_table(arrow.table({"date": times, "a": cells}), tmp_path / "other.parquet")
        with pytest.raises(ValueError, match=error):
            read_series(tmp_path / "other.parquet")
    parquet.write_table(arrow.table([times, cells, cells], names=["date", "a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: several columns are called 'a'; rename them"):
        read_series(tmp_path / "twice.parquet")


def test_parquets_words_and_large_whole_numbers_are_read_as_those_of_a_csv(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    csv = read_series(write(tmp_path, f"t,a,b\n1,1.5,{2**60 + 1}\n2,NA,3\n"), Reading(time="t"))
    parquet.write_table(arrow.table({"t": [1, 2], "a": ["1.5", None], "b": [2**60 + 1, 3]}), tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_series(tmp_path / "t.parquet", Reading(time="t")).values, csv.values)


# -- splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "shares", "sizes", "windows"),
    [
        (17_420, (8640, 2880, 2880), (8640, 2880, 2880), {96: (8449, 2785, 2785), 720: (7825, 2161, 2161)}),
        (69_680, (34_560, 11_520, 11_520), (34_560, 11_520, 11_520), {96: (34_369, 11_425, 11_425)}),
        (52_696, (0.7, 0.1, 0.2), (36_887, 5270, 10_539), {96: (36_696, 5175, 10_444), 720: (36_072, 4551, 9820)}),
        (26_304, (0.7, 0.1, 0.2), (18_412, 2632, 5260), {96: (18_221, 2537, 5165)}),
    ],
)
def test_parts_have_the_rows_and_windows_of_the_protocol(rows, shares, sizes, windows):
    splits = Splits.of(rows, shares)
    assert (splits.train, splits.validation, splits.test) == sizes
    for horizon, counts in windows.items():
        assert tuple(splits.windows(part, 96, horizon) for part in PARTS) == counts
    assert splits.rows("validation", 96) == slice(sizes[0] - 96, sizes[0] + sizes[1])
    assert splits.rows("test", 96) == slice(sizes[0] + sizes[1] - 96, sum(sizes))


def test_the_scaler_is_the_training_parts_mean_and_deviation():
    values = np.random.default_rng(0).normal(3, 5, (50, 2))
    values[:, 1] = 7
    scaler = Scaler.fit(values[:30])
    scaled = scaler.apply(values)
    np.testing.assert_allclose([scaled[:30, 0].mean(), scaled[:30, 0].std()], [0, 1], atol=1e-12)
    assert np.all(scaled[:, 1] == 0)
    np.testing.assert_allclose(scaler.undo(scaled), values)


@pytest.mark.parametrize("value", [0.1, -1013.3, 1e9])
def test_a_constant_column_is_only_centred(value):
    scaler = Scaler.fit(np.full((420, 1), value))
    assert scaler.deviation == 1
    assert Scaler.fit(value + 1e-6 * np.arange(420)[:, None] * abs(value)).deviation < 1e-3 * abs(value)


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("ETTh1", 17_420, 7), ("ETTm2", 69_680, 7), ("Weather", 52_696, 21)]
)
def test_the_published_data_sets_are_read_as_they_are(name, rows, columns):
    try:
        find_benchmark(name, DATA)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    series, splits = read_benchmark(name, DATA)
    assert series.values.shape == (rows, columns)
    assert splits.windows("test", 96, 96) == {"ETTh1": 2785, "ETTm2": 11_425, "Weather": 10_444}[name]
    if name == "Weather":
        assert (series.values == -9999).any()
