"""Online forecasting: what is forecast depends on the stream alone, not on how it was cut, stopped or stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import predictor, waves

from titanmem.data.series import write_series
from titanmem.data.splits import Scaler
from titanmem.forecast import OnlineForecaster
from titanmem.forecast.online import online_errors

MEMORIES = ["lmm", "mac", "mag", "mal"]


def fed(values: np.ndarray, *cuts: int, mixer: str = "lmm") -> OnlineForecaster:
    online = OnlineForecaster(predictor(mixer))
    for part in np.split(values, cuts):
        online.feed(part)
    return online


@pytest.mark.parametrize("mixer", MEMORIES)
@pytest.mark.parametrize("cuts", [(1, 12, 13, 40), tuple(range(1, 75))])
def test_fed_in_pieces_is_fed_at_once(mixer, cuts):
    values = waves(75).values
    whole, parts = fed(values, mixer=mixer), fed(values, *cuts, mixer=mixer)
    np.testing.assert_array_equal(parts.forecast(), whole.forecast())
    assert parts.state.seen == whole.state.seen == 75


@pytest.mark.parametrize("mixer", MEMORIES)
def test_saved_and_resumed_is_uninterrupted(tmp_path, mixer):
    values = waves(90).values
    online = fed(values[:41], mixer=mixer)
    online.save(tmp_path / "stream.safetensors")
    resumed = OnlineForecaster.resume(predictor(mixer), tmp_path / "stream.safetensors")
    for one in (online, resumed):
        one.feed(values[41:])
    np.testing.assert_array_equal(resumed.forecast(), online.forecast())


def test_a_forecast_changes_nothing():
    online = fed(waves(60).values)
    before = online.state
    np.testing.assert_array_equal(online.forecast(), online.forecast())
    assert online.state is before


def test_the_memory_of_what_lies_before_the_look_back_matters():
    values = waves(60).values
    other = values.copy()
    other[:20] = values[20:40][::-1]
    assert np.abs(fed(values).forecast() - fed(other).forecast()).max() > 1e-4
    short = predictor().predict(replace(waves(60), values=values)).values  # window by window sees no difference
    np.testing.assert_array_equal(short, predictor().predict(replace(waves(60), values=other)).values)


def test_before_the_first_window_leaves_the_look_back_it_is_the_plain_forecast():
    series = waves(23)
    np.testing.assert_array_equal(fed(series.values).forecast(), predictor().predict(series).values)


def test_the_state_does_not_grow():
    sizes = {fed(waves(rows).values).state.nbytes for rows in (36, 60, 204)}
    assert len(sizes) == 1


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_errors_are_those_of_forecasts_made_one_by_one(share):
    one, series = predictor(), waves(70)
    gone = np.random.default_rng(1).random((70, 2)) < share
    series.values[gone] = np.nan  # no truth, and read as a stream fills it
    scaled = one.truth(series)
    online, differences = OnlineForecaster(one), []
    for row, values in enumerate(series.values):
        if 20 <= row <= 65:
            forecast = one.scaler.apply(online.forecast())
            differences.append(forecast - scaled[row : row + 5].numpy())
        online.feed(values)
    found = online_errors(one.model, scaled, 20)
    assert found["windows"] == len(differences) == 46
    assert np.isnan(differences).any() == (share > 0)
    assert found["mse"] == pytest.approx(np.nanmean(np.square(differences)), rel=1e-4)
    assert found["mae"] == pytest.approx(np.nanmean(np.abs(differences)), rel=1e-4)
    with pytest.raises(ValueError, match="all values to forecast are missing"):
        online_errors(one.model, torch.full((70, 2), float("nan")), 20)


def test_a_missing_value_takes_the_one_before():
    values = waves(50).values
    holes, filled = values.copy(), values.copy()
    holes[30, 1] = np.nan
    filled[30, 1] = values[29, 1]
    np.testing.assert_array_equal(fed(holes, 30, 31).forecast(), fed(filled).forecast())


def test_only_new_rows_of_a_table_are_read():
    series = waves(60)
    online = OnlineForecaster(predictor())
    assert online.feed_new(replace(series, values=series.values[:40], times=series.times[:40])) == 40
    assert [online.feed_new(series) for _ in range(2)] == [20, 0]
    np.testing.assert_array_equal(online.forecast(), fed(series.values).forecast())
    expected = "stopped at 2024-01-03 11:00:00, which the table neither holds nor follows .* give another --state, or"
    with pytest.raises(ValueError, match=expected):
        online.feed_new(replace(series, values=series.values[:40], times=series.times[:40]))


def test_a_table_that_begins_right_after_the_stream_is_read():
    series, online = waves(60), OnlineForecaster(predictor())
    parts = [
        replace(series, values=series.values[rows], times=series.times[rows]) for rows in np.split(range(60), [40])
    ]
    assert [online.feed_new(part) for part in parts] == [40, 20]
    np.testing.assert_array_equal(online.forecast(), fed(series.values).forecast())
    with pytest.raises(ValueError, match="neither holds nor follows on"):
        online.feed_new(replace(series, times=series.times + 61 * series.step))


def test_repeated_times_are_read_once():
    series = waves(60)
    times = series.times.copy()
    times[38:42] = times[38]
    repeated = replace(series, times=times)
    online = OnlineForecaster(predictor())
    assert [online.feed_new(repeated.first(rows)) for rows in (39, 40, 40, 41, 60)] == [39, 1, 0, 1, 19]
    np.testing.assert_array_equal(online.forecast(), fed(series.values).forecast())


def test_gaps_of_a_table_are_filled_from_the_stream_alone(tmp_path):
    one, values, hours = predictor(), waves(60).values, waves(60).times
    values[0, 1] = values[29:33, 0] = values[45, 1] = np.nan

    def read(name: str, rows: slice):
        path = tmp_path / f"{name}.csv"
        write_series(path, replace(waves(), values=values[rows], times=hours[rows]))
        return one.read_new(path)

    whole = OnlineForecaster(one)
    whole.feed_new(read("whole", slice(None)))
    parts = OnlineForecaster(one)
    for name, rows in {"a": slice(30), "one": slice(30, 31), "b": slice(31, 60)}.items():
        parts.feed_new(read(name, rows))
    np.testing.assert_array_equal(parts.forecast(), whole.forecast())
    np.testing.assert_array_equal(parts.forecast(), fed(values).forecast())
    with pytest.raises(ValueError, match="--missing linear looks ahead, which a stream cannot"):
        one.read_new(tmp_path / "a.csv", missing="linear")


def test_a_stream_of_other_weights_or_scales_is_refused(tmp_path):
    path, same = tmp_path / "stream.safetensors", predictor()
    fed(waves(40).values).save(path)
    OnlineForecaster.resume(same, path)
    retrained, scaled = predictor(), replace(same, scaler=Scaler.fit(waves().values[:120]))
    next(retrained.model.parameters()).data += 1e-3
    for other in (retrained, scaled):
        with pytest.raises(ValueError, match="read by another model: its weights, columns or scales"):
            OnlineForecaster.resume(other, path)


def test_rows_with_names_are_read_by_them():
    pandas = pytest.importorskip("pandas")
    values = waves(40).values
    frame = pandas.DataFrame(values[:, ::-1], columns=["b", "a"])
    online = OnlineForecaster(predictor())
    online.feed(frame[:39])
    online.feed(frame.iloc[39])
    np.testing.assert_array_equal(online.forecast(), fed(values).forecast())
    with pytest.raises(ValueError, match="no column 'b'; there are c, a; the model was trained on a, b"):
        online.feed(frame.rename(columns={"b": "c"}))


def test_mistakes_are_explained(tmp_path):
    for mixer in ("attention", "dlinear"):
        with pytest.raises(ValueError, match=f"{mixer} has no memory that goes on"):
            OnlineForecaster(predictor(mixer))
    with pytest.raises(ValueError, match="looks back 12 rows; 11 were read"):
        fed(waves(11).values).forecast()
    with pytest.raises(ValueError, match="40 rows were fed without their times"):
        fed(waves(40).values).feed_new(waves(50))
    with pytest.raises(ValueError, match="'b' has the value inf in row 2 of 2"):
        OnlineForecaster(predictor()).feed(np.array([[1, 2], [1, np.inf]]))
    with pytest.raises(ValueError, match=r"the columns a, b: \[rows, 2\], got \[4, 3\]"):
        OnlineForecaster(predictor()).feed(np.zeros((4, 3)))
    fed(waves(40).values).save(tmp_path / "lmm.safetensors")
    with pytest.raises(ValueError, match=r"belongs to another config .*mixer"):
        OnlineForecaster.resume(predictor("mac"), tmp_path / "lmm.safetensors")
