"""Training forecasters: windows of one table, gathered on the device, validated after every epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from titanmem.config import Config, check_counts, check_types, require
from titanmem.data.series import Reading, Series, fill_parts, read_rows
from titanmem.data.splits import PARTS, Scaler, Splits
from titanmem.data.times import show_step
from titanmem.models.series import Forecaster, SeriesConfig
from titanmem.tasks.base import generator_of
from titanmem.train.config import OptimConfig, ParallelConfig, RunConfig
from titanmem.train.parallel import Ranks, Spread
from titanmem.train.source import Batch, Evaluation, Source

BESIDE = "data.json"  # what a forecast needs to know about the table, in the run's folder and beside exported models
MOST_ROWS = 16_384  # series × channels of one forward pass
LEAST_STEPS = 25  # of an epoch: a short table is gone through several times


@dataclass(frozen=True)
class SeriesData(Config):
    """Which table, how it is read and split, and how many windows a step takes."""

    path: str = ""
    time: str | None = None  # the time column; default: found
    columns: Sequence[str] | None = None  # default: all others
    time_format: str | None = None
    missing: str = "last"
    irregular: str = "fill"
    split: Sequence[float] = (0.7, 0.1, 0.2)  # shares of training, validation and test, or numbers of rows
    batch: int = 256  # windows of a step
    epochs: int = 10
    chain: int = 1  # windows one after another in a row, the memory going on from one to the next

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "batch", "epochs", "chain")
        fits = isinstance(self.split, (list, tuple)) and len(self.split) == 3
        fits = fits and all(isinstance(x, (int, float)) and x >= 0 for x in self.split) and self.split[0] > 0
        counts = fits and all(type(x) is int for x in self.split) and sum(self.split) > 1
        require(
            fits and (counts or abs(sum(self.split) - 1) < 1e-6),
            "data.split lists training, validation and test as shares that add up to 1 (0.7, 0.1, 0.2) or numbers of "
            f"rows, got {self.split!r}",
        )
        self.reading()

    def reading(self) -> Reading:
        """How the table is read."""
        columns = None if self.columns is None else tuple(self.columns)
        return Reading(self.time, columns, self.time_format, self.missing, self.irregular)

    def table(self) -> tuple[Series, Splits]:
        """The table and its parts; missing values of the training part are filled from that part alone."""
        require(self.path != "", "name a table: data.path=FILE.csv")
        series = read_rows(self.path, self.reading())
        splits = Splits.of(len(series), self.split)
        return fill_parts(series, splits.train, self.missing, self.path), splits


@dataclass(frozen=True)
class SeriesRun(RunConfig):
    """A forecaster on one table."""

    unit: ClassVar[str] = "windows"
    loss: ClassVar[str] = "mean squared error, scaled"
    use: ClassVar[str] = "titanmem forecast predict {} TABLE"

    model: SeriesConfig = field(default_factory=SeriesConfig)
    data: SeriesData = field(default_factory=SeriesData)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-3, warmup=50, final=0.02, betas=(0.9, 0.99), weight_decay=0.05)
    )
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(precision="fp32"))
    micro_rows: int = 256
    patience: int | None = 3
    kind: str = "series"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.data.chain == 1 or self.model.learns_online,
            f"data.chain={self.data.chain} carries a memory from window to window; {self.model.mixer} has none",
        )

    @property
    def rows(self) -> int:
        return self.data.batch

    @property
    def amount(self) -> int:
        return self.rows * self.data.chain

    def open_source(self) -> SeriesSource:
        return SeriesSource(self)

    @property
    def span(self) -> int:
        """Rows of the table in one training row."""
        return self.model.look_back * self.data.chain + self.model.horizon

    def fit(self, given: Collection[str]) -> SeriesRun:
        """The steps of so many epochs, an evaluation after each, and micro-batches for this number of channels."""
        series, splits = self.data.table()
        check_lengths(self, series, splits)
        there = splits.train - self.span + 1
        batch = min(self.data.batch, there)
        epoch = max(LEAST_STEPS, there // (batch * self.data.chain))
        steps = self.steps if "steps" in given else epoch * self.data.epochs
        wanted: dict[str, Any] = {
            "steps": steps,
            "eval_every": min(epoch, steps),
            "save_every": steps,
            "log_every": min(epoch, steps),
            "micro_rows": max(1, min(batch, MOST_ROWS // len(series.columns))),
            "optim.warmup": min(self.optim.warmup, max(1, steps // 10)),
            "data.batch": batch,
        }
        kept = {name: value for name, value in wanted.items() if name not in given or name == "steps"}
        return self.change(kept)

    def prepare(self) -> None:
        check_lengths(self, *self.data.table())

    def keep_data(self, folder: Path, begun: bool) -> None:
        """Columns, scales and step of the table. It must be the same one when the run goes on."""
        series, splits = self.data.table()
        scaler = Scaler.fit(series.values[: splits.train])
        about = {
            "columns": series.columns,
            "time": series.time,
            "step": show_step(series.step),
            "rows": splits.to_dict(),
            "mean": scaler.mean.tolist(),
            "deviation": scaler.deviation.tolist(),
            "data": self.data.to_dict(),
        }
        file = folder / BESIDE
        if begun and file.exists():
            held = json.loads(file.read_text())
            same = all(held[name] == about[name] for name in ("columns", "step", "rows"))
            require(
                same and all(np.allclose(held[name], about[name], rtol=1e-9) for name in ("mean", "deviation")),
                f"{self.data.path} is not what it was when the run in {folder} began (its rows, columns or scales are "
                "others); put the table back, or choose another --out",
            )
            return
        file.write_text(json.dumps(about, indent=1) + "\n")

    def write_beside(self, folder: Path, run: Path) -> None:
        """What `keep_data` kept, whatever became of the table."""
        require(
            (run / BESIDE).exists(),
            f"{run} has no {BESIDE}, which training writes; titanmem train --resume {run} writes it from its table",
        )
        (folder / BESIDE).write_text((run / BESIDE).read_text())


def check_lengths(config: SeriesRun, series: Series, splits: Splits) -> None:
    """Whether every part has a window, and a value to forecast that the table holds."""
    look_back, horizon = config.model.look_back, config.model.horizon
    name = config.data.path
    require(
        splits.train >= config.span,
        f"{name} has {len(series):,} rows, {splits.train:,} of them to train on; one training row takes "
        f"{config.span:,} (look-back {look_back} × {config.data.chain} + horizon {horizon}). Give more rows, a shorter "
        "look-back or horizon, or another data.split",
    )
    for part in ("validation", "test"):
        rows = getattr(splits, part)
        require(
            rows == 0 or splits.windows(part, look_back, horizon) > 0,
            f"{name}: the {part} part has {rows:,} rows, fewer than the horizon of {horizon}; give a shorter horizon "
            "or another data.split",
        )
    truth = series.truth
    for part, called in zip(PARTS, ("training", "validation", "test"), strict=True):
        wanted = truth[splits.rows(part, look_back)][look_back:]
        require(
            getattr(splits, part) == 0 or not np.isnan(wanted).all(),
            f"{name}: all values to forecast in the {called} part are missing, and filled ones are no truth to measure "
            "by; give another data.split, or a table that holds some",
        )


def windows_of(values: Tensor, span: int) -> Tensor:
    """All windows of `span` rows of values [T, C] as a view, [N, span, C]."""
    return values.unfold(0, span, 1).transpose(1, 2)


@torch.no_grad()
def window_errors(
    forecast: Callable[[Tensor], Tensor], values: Tensor, look_back: int, horizon: int, truth: Tensor | None = None
) -> dict[str, Any]:
    """Mean squared and absolute error over all windows of values [T, C]; also by steps ahead. `truth` is `values` with
    NaN where they were filled: read, and not to be forecast. A step ahead without any truth has None."""
    require(
        len(values) >= look_back + horizon,
        f"no window fits into {len(values)} rows; it takes look-back {look_back} + horizon {horizon}",
    )
    found = windows_of(values, look_back + horizon)
    known = windows_of(values if truth is None else truth, look_back + horizon)
    most = max(1, MOST_ROWS // values.shape[1])
    squares, sizes, counts = (torch.zeros(horizon, dtype=torch.float64, device=values.device) for _ in range(3))
    for part, wanted in zip(found.split(most), known.split(most), strict=True):
        difference, count = differences(forecast(part[:, :look_back]), wanted[:, look_back:])
        squares += difference.square().sum((0, 2))
        sizes += difference.abs().sum((0, 2))
        counts += count.sum((0, 2))
    total = check_truth(counts.sum().item())
    by_step = {
        name: [each / count if count else None for each, count in zip(sums.tolist(), counts.tolist(), strict=True)]
        for name, sums in {"mse": squares, "mae": sizes}.items()
    }
    return {
        "mse": squares.sum().item() / total,
        "mae": sizes.sum().item() / total,
        "windows": len(found),
        "by_step": by_step,
    }


def differences(forecast: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Forecast minus truth in float64, 0 where the truth is NaN, and where it is known."""
    gone = truth.isnan()
    difference = (forecast - truth).double()
    return difference.masked_fill_(gone, 0), ~gone  # in place: another layout is summed in another order


def check_truth(count: float) -> float:
    """The number of values that were forecast and are known; refused if there is none."""
    require(
        count > 0,
        "no forecast can be compared with the truth: all values to forecast are missing in the table, and filled ones "
        "do not count; give rows that hold some",
    )
    return count


class SeriesSource(Source):
    """Windows of the training part in an order that is drawn anew every epoch; all windows of the validation part."""

    def __init__(self, config: SeriesRun) -> None:
        self.config = config
        series, self.splits = config.data.table()
        self.scaler = Scaler.fit(series.values[: self.splits.train])
        self.values = torch.from_numpy(self.scaler.apply(series.values).astype(np.float32))
        self.truth = self.values  # with NaN where the table has no value: read as it was filled, not to be forecast
        if series.filled is not None:
            self.truth = self.values.masked_fill(torch.from_numpy(series.filled), float("nan"))
        self.gaps = bool(self.truth[: self.splits.train].isnan().any())
        self.notes = [f"{config.data.path}: {note}" for note in series.notes]
        if series.filled is not None:
            self.notes.append("what was filled or inserted is read, but does not count in losses and errors")
        if not self.splits.validation:
            self.notes.append("nothing is held out for validation: no early stopping, the last step is what counts")
        self.warning = "\n".join(self.notes) or None

    def batches(self, step: int, ranks: Ranks) -> Iterator[Batch]:
        """This rank's windows of every step that is left. All of them are on the device from the start."""
        config, look_back = self.config, self.config.model.look_back
        self.values = self.values.to(ranks.device)
        windows = windows_of(self.values[: self.splits.train], config.span)
        truths = windows_of(self.truth[: self.splits.train].to(ranks.device), config.span) if self.gaps else None
        per_epoch = max(1, len(windows) // config.rows)
        order, epoch = torch.empty(0), -1
        for number in range(step, config.steps):
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = torch.randperm(len(windows), generator=generator_of(config.seed, epoch)).to(ranks.device)
            first = number % per_epoch * config.rows
            mine = order[first : first + config.rows][ranks.rank :: ranks.world]
            taken = windows[mine]
            wanted = taken if truths is None else truths[mine]
            yield {"x": taken[:, : config.span - config.model.horizon], "y": wanted[:, look_back:]}

    def count(self, batch: Batch) -> int:
        model = self.config.model
        wanted = batch["y"].unfold(1, model.horizon, model.look_back)
        return wanted.numel() - (int(wanted.isnan().sum()) if self.gaps else 0)

    def evaluate(self, spread: Spread) -> Evaluation | None:
        """Errors over all windows of the validation part, each from a fresh memory."""
        if not self.splits.validation:
            return None
        found = self.errors(lambda x: spread.forward(x)[0], "validation", spread.ranks.device)
        return {"held_out": found["mse"], "mae": found["mae"]}, None

    def errors(self, forecast: Callable[[Tensor], Tensor], part: str, device: torch.device) -> dict[str, Any]:
        """What `window_errors` finds in a part, on scaled values."""
        model = self.config.model
        rows = self.splits.rows(part, model.look_back)
        values, truth = (x[rows].to(device) for x in (self.values, self.truth))
        return window_errors(forecast, values, model.look_back, model.horizon, truth)

    def brief(self, found: dict[str, Any]) -> str:
        return f"validation MSE {found['held_out']:.4f}, MAE {found['mae']:.4f}"


def errors_on_test(config: SeriesRun, model: Forecaster) -> dict[str, Any]:
    """Errors over all test windows, each from a fresh memory."""
    source = config.open_source()
    require(source.splits.test > 0, "the split leaves nothing to test on; give data.split=[0.7,0.1,0.2]")
    device = next(model.parameters()).device
    return source.errors(lambda x: model(x)[0], "test", device)
