"""Forecasting runs: one setting per model for tables of any kind, and the published data sets with their splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.splits import BENCHMARKS, find_benchmark
from titanmem.models.series import LINEAR, MIXERS, SeriesConfig
from titanmem.train.config import OptimConfig
from titanmem.train.series import SeriesData, SeriesRun


def series_run(mixer: str, **data: Any) -> SeriesRun:
    """A run of a model; it still needs its table (data.path) and `fit`."""
    require(mixer in MIXERS, f"unknown model {mixer!r}; known: {', '.join(MIXERS)}")
    rate, decay = (5e-3, 0.0) if mixer in LINEAR else (2e-3, 0.05)
    return SeriesRun(
        model=SeriesConfig(mixer=mixer),
        data=SeriesData(**data),
        optim=OptimConfig(lr=rate, warmup=50, final=0.02, betas=(0.9, 0.99), weight_decay=decay),
    )


def benchmark_run(
    dataset: str, horizon: int, mixer: str, folder: str | Path, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> SeriesRun:
    """A published data set by its protocol: look-back 96, rows and sentinels as they are, its own split. `settings`
    change what the recipe says."""
    run = series_run(
        mixer, path=str(find_benchmark(dataset, folder)), missing="error", irregular="keep",
        split=BENCHMARKS[dataset].shares, epochs=10 if dataset in ("ETTh1", "ETTh2") else 5,
    )  # fmt: skip
    given = {"model.horizon": horizon, "seed": seed, **(settings or {})}
    return run.change(given).fit(given)
