"""TitansForecaster: fit and predict in sktime's convention, for its pipelines, cross-validation and grid searches."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from titanmem.data.packages import load_package
from titanmem.data.series import Series, write_series
from titanmem.data.splits import Scaler
from titanmem.forecast.predictor import Predictor
from titanmem.recipes.series import series_run
from titanmem.train.export import load_run
from titanmem.train.loop import train

load_package("sktime", "TitansForecaster", "forecast")
from sktime.datatypes import update_data  # noqa: E402
from sktime.forecasting.base import BaseForecaster  # noqa: E402


class TitansForecaster(BaseForecaster):
    """A forecaster of one or several series with common weights, trained by titanmem's loop.

    >>> TitansForecaster(look_back=48).fit(y, fh=range(1, 25)).predict()  # doctest: +SKIP

    The horizon is the farthest step of `fh`. The last tenth of the rows decides when to stop, where it is long enough.
    `settings` are those of `titanmem forecast train`, for instance {"model.dim": 32, "optim.lr": 1e-3}. New rows that
    `update` brings, or brings anew, are looked back on; the weights stay as they were fitted. `random_state` is a
    number, numpy's RandomState, or None for 0.
    """

    _tags: ClassVar[dict[str, Any]] = {
        "authors": "titanmem",
        "maintainers": "titanmem",
        "python_dependencies": ["torch"],
        "scitype:y": "both",
        "y_inner_mtype": "pd.DataFrame",
        "X_inner_mtype": "pd.DataFrame",
        "capability:exogenous": False,
        "requires-fh-in-fit": True,
        "capability:missing_values": False,
        "capability:insample": False,
        "capability:update": True,
        "capability:random_state": True,
        "property:randomness": "derandomized",
    }

    _config: ClassVar[dict[str, Any]] = {"remember_data": False}  # the rows it looks back on are kept here
    _y: Any = None  # sktime's own, where somebody asks it to remember after all
    _X: Any = None

    def __init__(
        self,
        look_back: int = 96,
        mixer: str = "lmm",
        epochs: int = 10,
        settings: dict[str, Any] | None = None,
        random_state: Any = 0,
        verbose: bool = False,
    ) -> None:
        self.look_back = look_back
        self.mixer = mixer
        self.epochs = epochs
        self.settings = settings
        self.random_state = random_state
        self.verbose = verbose
        super().__init__()

    def _fit(self, y: Any, X: Any, fh: Any) -> TitansForecaster:
        horizon = int(max(fh.to_relative(self.cutoff)))
        rows = len(y)
        look_back = max(2, min(self.look_back, rows - horizon - 1))
        held = rows - int(0.9 * rows)
        patch = max(1, min(16, look_back // 2))
        decides = held >= horizon and rows - held >= look_back + horizon
        chosen = {
            "model.horizon": horizon, "model.look_back": look_back,
            "model.patch": patch, "model.stride": -(-patch // 2),
            "data.epochs": self.epochs, "data.time": "none", "data.irregular": "keep", "seed": self._seed(),
            "data.split": [0.9, 0.1, 0.0] if decides else [1.0, 0.0, 0.0],
            **(self.settings or {}),
        }  # fmt: skip
        columns = [f"series {number}" for number in range(y.shape[1])]
        values = y.to_numpy(dtype=np.float64)
        with tempfile.TemporaryDirectory() as folder, self._said():
            table = Path(folder) / "table.csv"
            write_series(table, Series(columns, values, np.arange(rows)))
            given = {**chosen, "data.path": str(table), "data.columns": columns}
            try:
                config = series_run(self.mixer).change(given).fit(given)
            except ValueError as error:
                raise ValueError(str(error).replace(str(table), "y")) from None
            train(config, Path(folder) / "run")
            model, _ = load_run(Path(folder) / "run", best=config.data.split[1] > 0)
            _, splits = config.data.table()
        scaler = Scaler.fit(values[: splits.train])
        self.recent_ = y.iloc[-look_back:]
        self.names_ = y.columns
        self.predictor_ = Predictor(model.eval(), columns, scaler, config.data, "1")
        return self

    def _seed(self) -> int:
        """What numpy's RandomState draws; 0 for None."""
        given = self.random_state
        return int(given.randint(2**31 - 1) if hasattr(given, "randint") else given or 0)

    def _said(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.verbose else contextlib.redirect_stderr(io.StringIO())

    @torch.no_grad()
    def _predict(self, fh: Any, X: Any) -> Any:
        import pandas

        rows = self.recent_.to_numpy(dtype=np.float64)
        series = Series(self.predictor_.columns, rows, np.arange(len(rows)))
        values = self.predictor_.predict(series).values
        steps = np.asarray(fh.to_relative(self.cutoff), dtype=int)
        index = fh.to_absolute_index(self.cutoff)
        return pandas.DataFrame(values[steps - 1], index=index, columns=self.names_)

    def _update(self, y: Any, X: Any = None, update_params: bool = True) -> TitansForecaster:
        self.recent_ = update_data(self.recent_, y)[self.names_].iloc[-self.predictor_.look_back :]
        return self

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Small ones, for sktime's checks."""
        small = {"model.dim": 8, "model.num_heads": 2, "model.num_layers": 1, "steps": 3, "eval_every": 3}
        return [
            {"look_back": 4, "epochs": 1, "settings": small},
            {"look_back": 3, "mixer": "dlinear", "epochs": 1, "settings": {"steps": 3, "eval_every": 3}},
        ]
