"""Forecasting runs: epochs become steps, every window counts once, nothing of validation or test reaches training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from runs import assert_same_weights, losses_of

from titanmem.cli import main
from titanmem.data.series import Series, write_series
from titanmem.forecast import Predictor
from titanmem.models.series import SeriesConfig
from titanmem.train.config import RunConfig
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.metrics import read_metrics
from titanmem.train.parallel import Ranks
from titanmem.train.series import SeriesData, SeriesRun, errors_on_test, window_errors

ALONE = Ranks(0, 1, torch.device("cpu"), None)


def waves(rows: int = 220, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 0.1, (rows, 2))
    time = np.arange(rows)[:, None]
    return np.sin(2 * np.pi * time / [12, 8]) * [1, 5] + [0, 30] + noise


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "waves.csv"
    write_series(path, Series(["a", "b"], waves(), np.arange(220), "t"))
    return path


def small_run(table, mixer: str = "lmm", **settings) -> SeriesRun:
    model = SeriesConfig(look_back=24, horizon=6, mixer=mixer, patch=8, stride=4, dim=8, num_heads=2, num_layers=1)
    run = SeriesRun(model, SeriesData(path=str(table), time="t", batch=16, epochs=2))
    return run.change(settings).fit(settings)


def test_epochs_become_steps_and_evaluations(table):
    run = small_run(table, "rlinear", **{"data.batch": 4})
    assert run.steps == 2 * ((154 - 30 + 1) // 4)
    assert run.eval_every == (154 - 30 + 1) // 4
    assert RunConfig.from_dict(run.to_dict()) == run
    assert small_run(table, steps=7).steps == 7


def test_an_epoch_takes_every_training_window_once(table):
    run = small_run(table, "rlinear", **{"data.batch": 25})
    source = run.open_source()
    epoch = [batch for batch, _ in zip(source.batches(0, ALONE), range(5), strict=False)]
    seen = torch.cat([torch.cat([b["x"], b["y"]], 1) for b in epoch])
    windows = source.values[:154].unfold(0, 30, 1).transpose(1, 2)
    key = lambda x: sorted(map(tuple, x[:, :, 0].tolist()))
    assert key(seen) == key(windows)
    assert source.count(epoch[0]) == 25 * 6 * 2


def test_no_value_of_validation_or_test_reaches_scaler_or_batches(table, tmp_path):
    other = waves()
    other[154:] = 1e6
    write_series(tmp_path / "other.csv", Series(["a", "b"], other, np.arange(220), "t"))
    mine, theirs = (small_run(path).open_source() for path in (table, tmp_path / "other.csv"))
    np.testing.assert_array_equal(mine.scaler.mean, theirs.scaler.mean)
    np.testing.assert_array_equal(mine.scaler.deviation, theirs.scaler.deviation)
    for a, b, _ in zip(mine.batches(0, ALONE), theirs.batches(0, ALONE), range(20), strict=False):
        assert torch.equal(a["x"], b["x"])
        assert torch.equal(a["y"], b["y"])


@pytest.mark.parametrize("missing", ["last", "linear"])
def test_no_gap_of_the_training_part_is_filled_from_what_follows(tmp_path, missing):
    def source(later: float):
        values = waves()
        values[154:] = later
        values[:3, 0] = values[150:158, 1] = np.nan
        path = tmp_path / f"{later}.csv"
        write_series(path, Series(["a", "b"], values, np.arange(220), "t"))
        return small_run(path, **{"data.missing": missing}).open_source()

    mine, theirs = source(1.0), source(1e6)
    np.testing.assert_array_equal(mine.scaler.mean, theirs.scaler.mean)
    np.testing.assert_array_equal(mine.scaler.deviation, theirs.scaler.deviation)
    assert torch.equal(mine.values[:154], theirs.values[:154])
    assert any("across the end of the training part" in note for note in mine.notes) == (missing == "linear")


def with_gaps(tmp_path, *more: slice):
    """A table with a tenth of its values missing, and some rows whole."""
    values = waves()
    values[np.random.default_rng(1).random(values.shape) < 0.1] = np.nan
    for rows in more:
        values[rows] = np.nan
    path = tmp_path / "gaps.csv"
    write_series(path, Series(["a", "b"], values, np.arange(220), "t"))
    return path, values


@pytest.mark.parametrize("chain", [1, 2])
def test_what_was_filled_is_read_but_not_to_be_learnt(tmp_path, chain):
    path, values = with_gaps(tmp_path, slice(60, 75))
    source = small_run(path, **{"data.chain": chain}).open_source()
    scaled = torch.from_numpy(source.scaler.apply(values).astype(np.float32))
    gone = 0
    for batch, _ in zip(source.batches(0, ALONE), range(8), strict=False):
        assert not batch["x"].isnan().any()
        for x, y in zip(batch["x"], batch["y"], strict=True):
            start = next(row for row in range(154) if torch.equal(source.values[row : row + 24], x[:24]))
            torch.testing.assert_close(y, scaled[start + 24 :][: len(y)], rtol=0, atol=0, equal_nan=True)
        parts = [batch["y"][:, 24 * window : 24 * window + 6] for window in range(chain)]
        gone += sum(int(part.isnan().sum()) for part in parts)
        assert source.count(batch) == sum(int((~part.isnan()).sum()) for part in parts)
    assert gone > 0


@pytest.mark.parametrize("loss", ["mae", "mse", "huber"])
def test_a_value_nobody_knows_gives_no_loss_and_no_gradient(loss):
    torch.manual_seed(0)
    config = SeriesConfig(look_back=24, horizon=6, patch=8, stride=4, dim=8, num_layers=1, dropout=0.0, loss=loss)
    model, x, y = config.build(), torch.randn(3, 48, 2), torch.randn(3, 30, 2)
    gone = torch.rand(3, 30, 2) < 0.3
    each = {
        "mae": torch.abs,
        "mse": torch.square,
        "huber": lambda d: torch.where(d.abs() < 1, d * d / 2, d.abs() - 0.5),
    }
    truth, known = y.unfold(1, 6, 24).transpose(2, 3), ~gone.unfold(1, 6, 24).transpose(2, 3)
    wanted = each[loss](model(x)[0] - truth)[known].sum()
    found = model(x, y.masked_fill(gone, float("nan")))[0]
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(value, list(model.parameters())) for value in (found, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_errors_are_those_of_values_that_the_table_holds(tmp_path, part):
    path, values = with_gaps(tmp_path)
    source = small_run(path).open_source()
    found = source.errors(lambda x: x[:, -1:].expand(-1, 6, -1) * 0.5, part, torch.device("cpu"))
    rows, read = source.scaler.apply(values), source.values.double().numpy()
    first, stop = {"validation": (154, 176), "test": (176, 220)}[part]
    differences = np.stack([read[t - 1] * 0.5 - rows[t : t + 6] for t in range(first, stop - 5)])
    assert np.isnan(differences).any()
    assert found["mse"] == pytest.approx(np.nanmean(differences**2), rel=1e-5)
    assert found["mae"] == pytest.approx(np.nanmean(np.abs(differences)), rel=1e-5)
    assert found["by_step"]["mse"] == pytest.approx(np.nanmean(differences**2, (0, 2)).tolist(), rel=1e-5)


def test_a_step_ahead_without_truth_has_no_error():
    values = torch.randn(30, 1)
    truth = values.clone()
    truth[26] = float("nan")
    found = window_errors(lambda x: x[:, -6:], values, 24, 6, truth)
    assert [error is None for error in found["by_step"]["mae"]] == [False, False, True, False, False, False]
    assert found["mae"] == pytest.approx((values[18:24] - truth[24:]).abs().nanmean().item())
    truth[24:] = float("nan")
    with pytest.raises(ValueError, match="all values to forecast are missing in the table, and filled ones do not"):
        window_errors(lambda x: x[:, -6:], values, 24, 6, truth)


@pytest.mark.parametrize(
    ("part", "rows"),
    [("training", slice(24, 154)), ("validation", slice(154, 176)), ("test", slice(176, None))],
)
def test_a_part_without_a_value_to_forecast_is_refused_before_training(tmp_path, part, rows):
    path, _ = with_gaps(tmp_path, rows)
    with pytest.raises(ValueError, match=f"all values to forecast in the {part} part are missing, .* data.split"):
        small_run(path)


def test_a_column_without_a_value_to_train_on_is_refused(tmp_path):
    values = waves()
    values[:154, 1] = np.nan
    write_series(tmp_path / "late.csv", Series(["a", "b"], values, np.arange(220), "t"))
    with pytest.raises(ValueError, match="'b' has no number in the 154 rows to train on; leave the column out"):
        small_run(tmp_path / "late.csv")


def test_shares_that_do_not_add_up_to_1_are_refused():
    with pytest.raises(ValueError, match=r"shares that add up to 1 .* got \(0.5, 0.1, 0.2\)"):
        SeriesData(split=(0.5, 0.1, 0.2))
    assert SeriesData(split=(1, 0, 0)).split == (1, 0, 0)


def test_an_export_has_the_scales_of_training_whatever_became_of_the_table(table, tmp_path):
    run = small_run(table, steps=3)
    train(run, tmp_path / "run")
    scaler = run.open_source().scaler
    rows = np.concatenate([waves(), 100 + waves(300, 1)])
    for step in ("grown", "gone"):
        if step == "grown":
            write_series(table, Series(["a", "b"], rows, np.arange(520), "t"))
            with pytest.raises(ValueError, match=r"is not what it was when the run in .* began"):
                train(run, tmp_path / "run")
        else:
            table.unlink()
        assert main(["export", str(tmp_path / "run"), str(tmp_path / step)]) == 0
        about = json.loads((tmp_path / step / "data.json").read_text())
        np.testing.assert_array_equal(about["mean"], scaler.mean)
        np.testing.assert_array_equal(about["deviation"], scaler.deviation)
    np.testing.assert_array_equal(Predictor.open(tmp_path / "run").scaler.mean, scaler.mean)


def test_errors_are_those_of_every_window(table):
    source = small_run(table).open_source()
    forecast = lambda x: x[:, -1:].expand(-1, 6, -1) * 0.5
    found = source.errors(forecast, "test", torch.device("cpu"))
    rows = source.values.double()
    differences = [rows[t - 1] * 0.5 - rows[t : t + 6] for t in range(220 - 44, 220 - 5)]
    assert found["windows"] == len(differences) == 39
    assert found["mse"] == pytest.approx(torch.stack(differences).square().mean().item(), rel=1e-5)
    assert found["mae"] == pytest.approx(torch.stack(differences).abs().mean().item(), rel=1e-5)
    assert np.mean(found["by_step"]["mse"]) == pytest.approx(found["mse"])


@pytest.mark.parametrize("chain", [1, 2])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(table, tmp_path, chain):
    run = small_run(table, steps=8, save_every=3, **{"data.chain": chain, "model.dropout": 0.3})

    class Crash(Exception):
        pass

    def crash(step: int, loss: float) -> None:
        if step > 4:
            raise Crash

    straight = losses_of(run, tmp_path / "straight")
    with pytest.raises(Crash):
        train(run, tmp_path / "resumed", on_step=crash)
    assert losses_of(run, tmp_path / "resumed") == straight[3:]
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("mixer", ["lmm", "attention", "rlinear"])
def test_a_run_learns_and_its_best_checkpoint_is_the_best_evaluation(table, tmp_path, mixer):
    run = small_run(table, mixer, **{"data.epochs": 4, "optim.lr": 1e-2, "model.dropout": 0.0})
    found = train(run, tmp_path / "run")
    held = [line["held_out"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "held_out" in line]
    assert found["best"]["held_out"] == min(held) < 0.15
    model, step = load_run(tmp_path / "run", best=True)
    assert step == found["best"]["step"]
    source = run.open_source()
    again = source.errors(lambda x: model.eval()(x)[0], "validation", torch.device("cpu"))
    assert again["mse"] == pytest.approx(min(held), rel=1e-5)
    assert errors_on_test(run, model)["mse"] < 0.15


def test_without_validation_the_run_goes_to_its_end(table, tmp_path):
    run = small_run(table, "rlinear", steps=5, **{"data.split": [1.0, 0.0, 0.0]})
    found = train(run, tmp_path / "run")
    assert (found["step"], found["best"]) == (5, None)


def test_too_few_rows_are_refused_with_their_number(tmp_path):
    write_series(tmp_path / "short.csv", Series(["a"], waves(40)[:, :1], np.arange(40), "t"))
    with pytest.raises(ValueError, match=r"has 40 rows, 28 of them to train on; one training row takes 30"):
        small_run(tmp_path / "short.csv")
    with pytest.raises(ValueError, match="the validation part has 4 rows, fewer than the horizon of 6"):
        small_run(tmp_path / "short.csv", **{"data.split": [0.8, 0.1, 0.1]})
    with pytest.raises(ValueError, match="rlinear has none"):
        SeriesRun(SeriesConfig(mixer="rlinear"), SeriesData(chain=2))


def test_the_usual_commands_work_on_its_runs(table, tmp_path, capsys):
    run = str(tmp_path / "run")
    train(small_run(table, steps=3), run)
    for words in (["train", "--resume", run, "--dry-run"], ["plot", run, "--out", str(tmp_path / "p.png")]):
        assert main(words) == 0
    assert main(["export", run, str(tmp_path / "model")]) == 0
    assert "titanmem forecast predict" in capsys.readouterr().out


def test_errors_of_no_window_are_refused():
    with pytest.raises(ValueError, match="no window fits into 29 rows; it takes look-back 24 \\+ horizon 6"):
        window_errors(lambda x: x, torch.zeros(29, 1), 24, 6)
