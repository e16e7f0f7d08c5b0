"""`titanmem forecast` from a table to forecasts, and its mistakes in one line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from tables import waves, write_waves

from titanmem.cli import main
from titanmem.data.series import Reading, read_series, write_series
from titanmem.forecast import Predictor
from titanmem.forecast.online import online_errors
from titanmem.forecast.pictures import forecast_figure
from titanmem.forecast.predictor import find_origin

SMALL = ["model.dim=8", "model.num_layers=1", "data.batch=16", "optim.lr=0.01"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    table, run = write_waves(folder / "waves.csv"), folder / "run"
    words = ["forecast", "train", str(table), "--horizon", "6", "--look-back", "24", "--epochs", "2", "--online"]
    assert main([*words, "--out", str(run), *SMALL, "data.chain=2"]) == 0
    return table, run


def test_training_leaves_errors_forecasts_and_pictures(trained):
    _, run = trained
    found = json.loads((run / "eval" / "eval.json").read_text())
    assert found["mse"] < 0.5 < found["last_value"]["mse"]
    assert found["windows"] == found["online"]["windows"] == 44 - 6 + 1
    assert {path.name for path in (run / "eval").iterdir()} >= {"eval.png", "by_step.png", "forecasts.csv"}
    rows = list(csv.DictReader((run / "eval" / "forecasts.csv").read_text().splitlines()))
    assert len(rows) == 7 * 6
    assert float(rows[0]["a (truth)"]) == pytest.approx(np.sin(2 * np.pi * 176 / 12), abs=0.5)


def test_a_forecast_follows_the_table_or_a_time_in_it(trained, tmp_path):
    table, run = trained
    assert main(["forecast", "predict", str(run), str(table), "--out", str(tmp_path / "f.csv")]) == 0
    made, known = read_series(tmp_path / "f.csv"), read_series(table)
    np.testing.assert_array_equal(made.times, known.after(6))
    np.testing.assert_array_equal(made.values, Predictor.open(run).predict(known).values)
    at = ["--at", "2024-01-09T08:00", "--out", str(tmp_path / "at.csv")]
    assert main(["forecast", "predict", str(run), str(table), *at]) == 0
    earlier = read_series(tmp_path / "at.csv")
    assert earlier.times[0] == np.datetime64("2024-01-09T08:00")
    assert np.abs(earlier.values - known.values[200:206]).mean() < 2
    assert (tmp_path / "at.png").stat().st_size > 5000


def test_a_row_is_found_by_its_time_by_its_whole_date_and_by_a_whole_number():
    assert [find_origin(waves(60), at) for at in ("2024-01-02", "2024-01-02T05", "2024-01-02 05:00")] == [24, 29, 29]
    for part in ("2024-01-0", "2024-01-02 1", "2024-01-02 05:0", "noon"):
        with pytest.raises(ValueError, match=f"--at takes a time such as .* got '{part}'"):
            find_origin(waves(60), part)
    numbered = replace(waves(60), times=np.arange(150, 210), step=1)
    assert find_origin(numbered, "200") == 50
    with pytest.raises(ValueError, match="no row at 20; the table has 150 … 209"):
        find_origin(numbered, "20")


def test_an_origin_beyond_the_table_is_refused(trained):
    table, run = trained
    predictor = Predictor.open(run)
    series = predictor.read(table)
    for origin in (-1, 221):
        with pytest.raises(ValueError, match=f"origin={origin} is none of the 220 rows"):
            predictor.predict(series, origin=origin)


def test_an_exported_forecaster_predicts_the_same(trained, tmp_path):
    table, run = trained
    assert main(["export", str(run), str(tmp_path / "model"), "--best"]) == 0
    series = read_series(table)
    one, other = (Predictor.open(folder).predict(series).values for folder in (run, tmp_path / "model"))
    np.testing.assert_array_equal(one, other)


def test_a_stream_goes_on_from_its_file(trained, tmp_path, capsys):
    table, run = trained
    part = write_waves(tmp_path / "part.csv", 150)
    state = ["--state", str(tmp_path / "s.safetensors")]

    def follow(source, name: str, where) -> np.ndarray:
        out = tmp_path / name
        assert main(["forecast", "online", str(run), str(source), *where, "--out", str(out)]) == 0
        return read_series(out).values

    follow(part, "a.csv", state)
    second = follow(table, "b.csv", state)
    assert "70 new rows read, 220 in all" in capsys.readouterr().out
    np.testing.assert_array_equal(second, follow(table, "c.csv", ["--state", str(tmp_path / "other.safetensors")]))


def test_one_new_row_goes_on_with_a_stream(trained, tmp_path, capsys):
    table, run = trained
    lines = table.read_text().splitlines()
    (tmp_path / "one.csv").write_text("\n".join([lines[0], lines[151]]))
    words = ["--state", str(tmp_path / "s.safetensors"), "--out", str(tmp_path / "f.csv")]
    for source in (write_waves(tmp_path / "part.csv", 150), tmp_path / "one.csv"):
        assert main(["forecast", "online", str(run), str(source), *words]) == 0
    assert "1 new row read, 151 in all" in capsys.readouterr().out
    np.testing.assert_array_equal(read_series(tmp_path / "f.csv").times, read_series(table).times[151:157])


def test_a_model_without_memory_is_not_evaluated_online(tmp_path, capsys):
    table, run = write_waves(tmp_path / "waves.csv"), str(tmp_path / "run")
    small = ["--horizon", "6", "--look-back", "24", "--model", "dlinear", "--out", run, "steps=2", "data.batch=16"]
    assert main(["forecast", "train", str(table), *small]) == 0
    assert main(["forecast", "eval", run, "--online"]) == 2
    assert "dlinear has no memory that goes on from window to window" in capsys.readouterr().err


def test_another_table_is_tested_whole(trained, tmp_path):
    _, run = trained
    other = write_waves(tmp_path / "other.csv", 60)
    assert main(["forecast", "eval", str(run), str(other), "--out", str(tmp_path / "eval")]) == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["windows"] == 60 - 24 - 6 + 1


def write_gaps(path, *, columns: dict[int, slice], rows: slice = slice(0, 0)) -> np.ndarray:
    """The waves with values missing and rows absent; returns the values by hour, NaN where there is none."""
    series = waves()
    for column, gone in columns.items():
        series.values[gone, column] = np.nan
    there = np.setdiff1d(np.arange(220), np.arange(220)[rows])
    write_series(path, replace(series, values=series.values[there], times=series.times[there]))
    series.values[rows] = np.nan
    return series.values


@pytest.mark.parametrize("missing", ["last", "linear"])
def test_values_that_are_not_in_the_table_are_no_truth(trained, tmp_path, capsys, missing):
    _, run = trained
    values = write_gaps(tmp_path / "gaps.csv", columns={0: slice(100, 103), 1: slice(140, 180, 2)}, rows=slice(60, 70))
    words = [str(tmp_path / "gaps.csv"), "--out", str(tmp_path / "eval"), "--missing", missing, "--online"]
    assert main(["forecast", "eval", str(run), *words]) == 0
    assert "349 of 392 values to forecast count" in capsys.readouterr().out
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert (found["values"], found["missing"]) == (392, 43)
    predictor = Predictor.open(run)
    truth = predictor.scaler.apply(values)
    read = predictor.scaled(predictor.read(words[0], missing=missing)).numpy()
    repeated = np.stack([read[t - 1] - truth[t : t + 6] for t in range(24, 215)])
    assert found["last_value"]["mse"] == pytest.approx(np.nanmean(repeated**2), rel=1e-5)
    assert found["online"] == online_errors(predictor.model, predictor.scale(values), 24)
    rows = list(csv.DictReader((tmp_path / "eval" / "forecasts.csv").read_text().splitlines()))
    written = [[float(row[f"{name} (truth)"] or "nan") for name in "ab"] for row in rows]
    np.testing.assert_allclose(written, values[24 : 24 + len(rows)], rtol=1e-5)
    assert all(np.isfinite(float(row[name])) for row in rows for name in "ab")


def test_a_table_whose_test_part_is_empty_is_refused_before_training(tmp_path, capsys):
    write_gaps(tmp_path / "gaps.csv", columns={0: slice(176, 220), 1: slice(176, 220)})
    words = ["--horizon", "6", "--look-back", "24", "--out", str(tmp_path / "run"), *SMALL]
    assert main(["forecast", "train", str(tmp_path / "gaps.csv"), *words]) == 2
    assert "all values to forecast in the test part are missing" in capsys.readouterr().err


def test_what_was_filled_is_blank_in_pictures_and_a_value_alone_is_a_dot():
    series = replace(waves(60), filled=np.zeros((60, 2), dtype=bool))
    series.filled[[20, 22, 30, 31], 0] = series.filled[50:52, 0] = True
    future = replace(series.first(6), times=series.times[40:46], filled=None)
    known, truth, forecast, _ = forecast_figure(series, future, 40, 12, {}).axes[0].lines
    np.testing.assert_array_equal(known.get_ydata(), series.truth[16:40, 0])
    assert known.get_markevery() == [21 - 16]
    np.testing.assert_array_equal(truth.get_ydata(), series.truth[40:46, 0])
    assert not np.isnan(forecast.get_ydata()).any()


@pytest.mark.parametrize("verb", ["predict", "online"])
def test_a_column_without_a_value_to_look_back_on_is_warned_of(trained, tmp_path, capsys, verb):
    _, run = trained
    write_gaps(tmp_path / "gaps.csv", columns={0: slice(197, 220), 1: slice(196, 220)})
    words = ["--state", str(tmp_path / "s.safetensors")] if verb == "online" else []
    words += ["--out", str(tmp_path / "f.csv")]
    assert main(["forecast", verb, str(run), str(tmp_path / "gaps.csv"), *words]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert "'b' has no value in the 24 rows that the forecast looks back on" in warned[0]


def test_a_file_that_was_there_is_not_replaced_without_a_word(trained, tmp_path, capsys):
    table, run = trained
    words = ["forecast", "predict", str(run), str(table), "--out", str(tmp_path / "f.csv")]
    assert main(words) == 0
    assert "replacing" not in capsys.readouterr().out
    (tmp_path / "f.png").unlink()
    assert main(words) == 0
    assert f"replacing what was there: {tmp_path / 'f.csv'} (--out" in capsys.readouterr().out


def test_mistakes_are_one_line(trained, tmp_path, capsys):
    table, run = trained
    text = table.read_text().splitlines()
    words = tmp_path / "words.csv"
    words.write_text("\n".join([*text[:9], "2024-01-01 08:00:00,high,1", *text[10:]]))
    twice = tmp_path / "twice.csv"
    twice.write_text("\n".join([*text[:9], *text[8:]]))
    other = tmp_path / "other.csv"
    other.write_text("\n".join(["date,a,c", *text[1:]]))
    few = write_waves(tmp_path / "few.csv", 20)
    sparse = tmp_path / "sparse.csv"
    sparse.write_text("\n".join([text[0], *text[1::3]]))
    one = tmp_path / "one.csv"
    one.write_text("\n".join(text[:2]))
    far = tmp_path / "far.csv"
    far.write_text("\n".join([*text[:-1], text[-1].split(",")[0] + ",1e30,1"]))
    train, predict = ["forecast", "train"], ["forecast", "predict", str(run)]
    for arguments, expected in [
        ([*train, str(words)], "line 10, column 'a': 'high' is not a number"),
        ([*train, str(twice)], "line 10: the time 2024-01-01 07:00:00 stands in line 9 too"),
        ([*train, str(tmp_path / "none.csv")], "no table at"),
        ([*train, str(table), "--columns", "a,z"], "no column 'z'; there are a, b"),
        ([*train, str(table), "--horizon", "200"], "one training row takes 296"),
        ([*train, str(table), "--split", "much"], "--split takes three numbers"),
        ([*train, str(table), "--split", "0.5,0.1,0.2"], "shares that add up to 1"),
        ([*train, str(table), "--columns", "a,a"], "named twice: 'a'"),
        ([*train, str(table), "--model", "arima"], "unknown model 'arima'; known: mac"),
        ([*train, str(table), "--model", "rmt"], "unknown model 'rmt'"),  # its tokens are the language model's
        ([*train, str(table), "model.width=3"], "model has no setting 'width'"),
        ([*predict, str(other)], "no column 'b'; there are a, c; the model was trained on a, b: give a table with"),
        ([*predict, str(few)], "looks back 24 rows; there are 20 before the end"),
        ([*predict, str(sparse)], "rows are mostly 3 hours apart, those the model was trained on 1 hour"),
        ([*predict, str(one)], "looks back 24 rows; there are 1 before the end"),
        ([*predict, str(far)], "'a' has the value 1e+30 in row 220 of 220"),
        ([*predict, str(table), "--at", "2031"], "no row at 2031; the table has 2024-01-01"),
        ([*predict, str(table), "--out", "f.txt"], "--out must end in .csv"),
        (["forecast", "predict", str(tmp_path), str(table)], "has no data.json"),
        (["forecast", "eval", str(tmp_path / "gone")], "no model at"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1


def test_a_table_is_checked_before_it_is_trained_on(tmp_path, capsys):
    table = write_waves(tmp_path / "waves.csv")
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:30], *lines[32:]]))
    assert main(["forecast", "train", str(table), "--horizon", "6", "--look-back", "24", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "2 absent rows inserted as missing values" in shown
    assert '"horizon": 6' in shown
    assert read_series(table, Reading(irregular="keep")).values.shape == (218, 2)
