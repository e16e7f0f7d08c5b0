"""Small tables and forecasters for the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from support import randomise
from titanmem.data.series import Series, write_series
from titanmem.data.splits import Scaler
from titanmem.forecast import Predictor
from titanmem.models.series import SeriesConfig
from titanmem.train.series import SeriesData


def waves(rows: int = 220, seed: int = 0) -> Series:
    """Two columns, hourly."""
    noise = np.random.default_rng(seed).normal(0, 0.1, (rows, 2))
    values = np.sin(2 * np.pi * np.arange(rows)[:, None] / [12, 8]) * [1, 5] + [0, 30] + noise
    times = np.datetime64("2024-01-01", "us") + np.arange(rows) * np.timedelta64(1, "h")
    return Series(["a", "b"], values, times, "date", np.timedelta64(3_600_000_000, "us"))


def write_waves(path: Path, rows: int = 220) -> Path:
    write_series(path, waves(rows))
    return path


def predictor(mixer: str = "lmm") -> Predictor:
    """With random weights in float32, so that what is compared bitwise is what users run."""
    torch.manual_seed(0)
    config = SeriesConfig(
        look_back=12, horizon=5, mixer=mixer, patch=4, stride=3, dim=8, num_heads=2, memory={"chunk_len": 3}
    )
    model = config.build().eval()
    randomise(model)
    return Predictor(model, ["a", "b"], Scaler.fit(waves().values[:100]), SeriesData(), "1 hour")
