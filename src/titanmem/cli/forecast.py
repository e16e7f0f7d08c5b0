"""`titanmem forecast train | eval | predict | online TABLE`: forecasts from a CSV or Parquet file.

titanmem forecast train power.csv --horizon 24 --out runs/power
titanmem forecast predict runs/power power.csv --out tomorrow.csv
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanmem.data.series import Series
    from titanmem.forecast.predictor import Predictor
    from titanmem.train.series import SeriesRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="forecast_verb", required=True, metavar="VERB")
    train = _verb(verbs, "train", "train a forecaster on a table; the same command again goes on where it stopped")
    train.add_argument("table", type=Path, help="a .csv or .parquet file with a time column and columns of numbers")
    train.add_argument("settings", nargs="*", help="key=value, for instance optim.lr=1e-3 model.dim=32")
    train.add_argument("--out", type=Path, help="the run's folder (default: runs/TABLE-MODEL-HORIZON)")
    train.add_argument("--model", default="lmm", help="lmm, mac, mag, mal, attention, rlinear, dlinear (default: lmm)")
    train.add_argument("--horizon", type=int, default=96, help="steps to forecast (default: 96)")
    train.add_argument("--look-back", type=int, default=96, help="steps a forecast looks back (default: 96)")
    train.add_argument("--columns", help="A,B,C (default: all but the time)")
    train.add_argument(
        "--split",
        help="shares of training, validation, test that add up to 1 (default: 0.7,0.1,0.2), or numbers of rows",
    )
    train.add_argument("--epochs", type=int, default=10, help="at most so many (default: 10)")
    train.add_argument("--online", action="store_true", help="train on chains of windows, for titanmem forecast online")
    train.add_argument("--dry-run", action="store_true", help="read and check the table, show the config, and stop")
    _add_reading(train)

    test = _verb(verbs, "eval", "errors on the test part of the model's table, or on all of another")
    test.add_argument("model", type=Path, help="a run of titanmem forecast train, or what titanmem export wrote")
    test.add_argument("table", type=Path, nargs="?", help="another table; all of its windows count")
    test.add_argument("--online", action="store_true", help="also with the memory going on from window to window")
    test.add_argument("--out", type=Path, help="folder for eval.json, eval.png, forecasts.csv (default: MODEL/eval)")
    _add_reading(test)

    predict = _verb(verbs, "predict", "forecast what follows a table")
    predict.add_argument("model", type=Path, help="a run of titanmem forecast train, or what titanmem export wrote")
    predict.add_argument("table", type=Path)
    predict.add_argument(
        "--at", help="forecast from this time on (a date alone: its first row), to compare with what came"
    )
    predict.add_argument("--out", type=Path, default=Path("forecast.csv"), help="(default: forecast.csv, and .png)")
    _add_reading(predict)

    online = _verb(verbs, "online", "read the new rows of a table into a memory that goes on learning, and forecast")
    online.add_argument("model", type=Path, help="a run of titanmem forecast train --online, or its export")
    online.add_argument("table", type=Path, help="rows newer than those read before are read")
    online.add_argument("--state", type=Path, required=True, help="file of the stream; made at the first call")
    online.add_argument("--out", type=Path, default=Path("forecast.csv"), help="(default: forecast.csv, and .png)")
    _add_reading(online)


def _verb(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary)
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time", help="the time column (default: found); none: rows are numbered")
    parser.add_argument("--time-format", help="as for strptime, for instance '%%d.%%m.%%Y %%H:%%M' (default: ISO 8601)")
    parser.add_argument("--missing", help="last, linear or error (default: last, the value before)")
    parser.add_argument("--irregular", help="fill, keep or error (default: fill, insert absent rows)")


def run(arguments: argparse.Namespace) -> int:
    verbs = {"train": train_table, "eval": evaluate, "predict": predict_table, "online": follow}
    return verbs[arguments.forecast_verb](arguments)


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("time", "time_format", "missing", "irregular")}
    return {name: value for name, value in given.items() if value is not None}


def _config(arguments: argparse.Namespace) -> tuple[SeriesRun, Path]:
    """The run that the command line asks for."""
    from titanmem.recipes.series import series_run
    from titanmem.train.config import parse_settings

    data: dict[str, Any] = {"path": str(arguments.table), "epochs": arguments.epochs, **_reading(arguments)}
    if arguments.columns:
        data["columns"] = [name.strip() for name in arguments.columns.split(",")]
    if arguments.split:
        try:
            data["split"] = json.loads(f"[{arguments.split}]")
        except json.JSONDecodeError:
            raise ValueError(f"--split takes three numbers such as 0.7,0.1,0.2, got {arguments.split!r}") from None
    settings = {f"data.{name}": value for name, value in data.items()}
    settings |= {"model.horizon": arguments.horizon, "model.look_back": arguments.look_back}
    if arguments.online:
        settings |= {"data.chain": 4, "data.batch": 64}  # as many windows a step as without
    given = parse_settings(arguments.settings)
    config = series_run(arguments.model).change({**settings, **given}).fit(given)
    name = f"{arguments.table.stem}-{arguments.model}-{config.model.horizon}{'-online' if arguments.online else ''}"
    return config, arguments.out or Path("runs") / name


def train_table(arguments: argparse.Namespace) -> int:
    config, folder = _config(arguments)
    series, splits = config.data.table()
    from titanmem.data.times import show_step, show_time

    print(
        f"{arguments.table}: {len(series):,} rows of {len(series.columns)} columns, {show_step(series.step)} apart, "
        f"{show_time(series.times[0])} … {show_time(series.times[-1])}; {splits.train:,} to train, "
        f"{splits.validation:,} to validate, {splits.test:,} to test"
    )
    if arguments.dry_run:
        for note in series.notes:
            print(f"  {note}")
        print(json.dumps(config.to_dict(), indent=1))
        print("\n".join(f"{name:27}{value}" for name, value in config.costs(1)))
        return 0
    from titanmem.train.loop import train

    if not train(config, folder)["complete"]:
        return 130
    from titanmem.forecast.predictor import Predictor

    predictor = Predictor.open(folder)
    if splits.test:
        _report(predictor, *splits.cut(series), folder / "eval", arguments.online, str(arguments.table))
    print(f"next: titanmem forecast predict {folder} {arguments.table}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    from titanmem.forecast.online import check_memory
    from titanmem.forecast.predictor import Predictor

    predictor = Predictor.open(arguments.model)
    if arguments.online:
        check_memory(predictor.model.config)
    table = arguments.table or Path(predictor.data.path)
    series = predictor.read(table, **_reading(arguments))
    first = predictor.look_back
    if arguments.table is None:
        from titanmem.data.splits import Splits

        splits = Splits.of(len(series), predictor.data.split)
        if not splits.test:
            raise ValueError("the model's split left nothing to test on; name another table")
        series, first = splits.cut(series)
    _say(series, table)
    _report(predictor, series, first, arguments.out or arguments.model / "eval", arguments.online, str(table))
    return 0


def _report(predictor: Predictor, series: Series, first: int, out: Path, online: bool, table: str) -> None:
    """Errors, printed and written; pictures; forecasts of every `horizon`-th row."""
    from titanmem.bench.report import table as show
    from titanmem.forecast.online import online_errors
    from titanmem.forecast.pictures import error_figure, forecast_figure
    from titanmem.forecast.predictor import rolling, write_rolling

    found = predictor.errors(series, first)
    records = [
        {"name": predictor.model.config.mixer, **found},
        {"name": "repeat the last value", **found["last_value"]},
    ]
    if online:
        carried = online_errors(predictor.model, predictor.truth(series), first)
        records.insert(1, {"name": f"{predictor.model.config.mixer}, memory going on", **carried})
        found["online"] = carried
    print(f"{found['windows']:,} forecasts of {predictor.horizon} steps, errors on scaled values")
    if found["missing"]:
        print(
            f"{found['values'] - found['missing']:,} of {found['values']:,} values to forecast count; the others are "
            "missing in the table, so that nothing is known to compare with"
        )
    print(show(records, {"name": "model", "mse": "MSE", "mae": "MAE"}))
    out.mkdir(parents=True, exist_ok=True)
    about = {"table": table, "first_row": first, "model": predictor.model.config.to_dict(), **found}
    (out / "eval.json").write_text(json.dumps(about, indent=1) + "\n")
    made = rolling(predictor, series, first)
    write_rolling(out / "forecasts.csv", made, series)
    origin = made[len(made) // 2][0]
    forecast_figure(series, predictor.predict(series, origin), origin, predictor.look_back, {}).savefig(
        out / "eval.png"
    )
    error_figure({predictor.model.config.mixer: found["by_step"]["mse"]}, "error by distance").savefig(
        out / "by_step.png"
    )
    print(f"written to {out}: eval.json, forecasts.csv, eval.png, by_step.png")


def _say(series: Series, table: Path) -> None:
    for note in series.notes:
        print(f"{table}: {note}")


def _write(forecast: Series, out: Path, series: Series, origin: int, predictor: Predictor) -> None:
    from titanmem.data.series import write_series
    from titanmem.forecast.pictures import forecast_figure

    if out.suffix != ".csv":
        raise ValueError(f"--out must end in .csv, got {out}")
    for note in forecast.notes:
        print(f"warning: {note}")
    picture = out.with_suffix(".png")
    there = [str(file) for file in (out, picture) if file.exists()]
    if there:
        print(f"replacing what was there: {' and '.join(there)} (--out names another file)")
    write_series(out, forecast)
    forecast_figure(series, forecast, origin, predictor.look_back, {}).savefig(picture)
    print(f"{len(forecast)} steps of {len(forecast.columns)} columns written to {out} and {picture}")


def predict_table(arguments: argparse.Namespace) -> int:
    from titanmem.forecast.predictor import Predictor, find_origin

    predictor = Predictor.open(arguments.model)
    series = predictor.read(arguments.table, **_reading(arguments))
    _say(series, arguments.table)
    origin = len(series) if arguments.at is None else find_origin(series, arguments.at)
    _write(predictor.predict(series, origin), arguments.out, series, origin, predictor)
    return 0


def follow(arguments: argparse.Namespace) -> int:
    from titanmem.data.series import Series
    from titanmem.forecast.online import OnlineForecaster
    from titanmem.forecast.predictor import Predictor

    predictor = Predictor.open(arguments.model)
    series = predictor.read_new(arguments.table, **_reading(arguments))
    _say(series, arguments.table)
    begun = arguments.state.exists()
    online = OnlineForecaster.resume(predictor, arguments.state) if begun else OnlineForecaster(predictor)
    if predictor.data.chain == 1:
        print(
            "this model was trained with a fresh memory for every window; --online at training makes it use an old one"
        )
    count = online.feed_new(series)
    online.save(arguments.state)
    new = "1 new row" if count == 1 else f"{count:,} new rows"
    print(f"{new} read, {online.state.seen:,} in all; the stream is in {arguments.state}")
    notes = predictor.unseen(series, len(series))
    times = series.after(predictor.horizon)
    forecast = Series(predictor.columns, online.forecast(), times, series.time, series.step, notes=notes)
    _write(forecast, arguments.out, series, len(series), predictor)
    return 0
