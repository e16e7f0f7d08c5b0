"""Scores of a classifier, all from its confusion matrix [C, C]: rows are the true classes, columns the predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from titanmem.train.plots import Metrics, new_figure

SCORES = ("mcc", "accuracy", "f1")


def confusion(true: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """How often each class was taken for each."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)


def scores(matrix: np.ndarray) -> dict[str, float]:
    """Matthews' correlation (of any number of classes), accuracy, and F1 as the mean over the classes that occur."""
    held = matrix.astype(np.float64)
    total, right = held.sum(), np.diag(held)
    true, predicted = held.sum(1), held.sum(0)
    spread = (total**2 - (true**2).sum()) * (total**2 - (predicted**2).sum())
    mcc = (right.sum() * total - (true * predicted).sum()) / spread**0.5 if spread > 0 else 0.0
    occurs = true + predicted > 0
    f1 = 2 * right[occurs] / (true + predicted)[occurs]
    return {"mcc": float(mcc), "accuracy": float(right.sum() / total), "f1": float(f1.mean())}


def confusion_figure(matrix: np.ndarray, classes: Sequence[str], title: str, lines: Metrics | None = None) -> Any:
    """The confusion matrix, with the learning curve of `lines` (metrics.jsonl) before it."""
    figure, axes = new_figure(3 if lines else 1, width=4.2, height=3.6)
    if lines:
        _curves(axes[0], axes[1], lines)
    axis = axes[-1]
    share = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= 12:
        for i, j in np.ndindex(*matrix.shape):
            colour = "white" if share[i, j] > 0.5 else "black"
            axis.text(j, i, f"{matrix[i, j]:,}\n{share[i, j]:.0%}", ha="center", va="center", color=colour, fontsize=8)
    places = range(len(classes))
    slope = 45 if max(map(len, classes)) > 6 else 0
    axis.set_xticks(places, classes, rotation=slope, ha="right" if slope else "center")
    axis.set_yticks(places, classes)
    axis.grid(visible=False)
    axis.set(xlabel="predicted", ylabel="true", title=title)
    return figure


def _curves(left: Any, right: Any, lines: Metrics) -> None:
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held = [(line["step"], line["dev"]) for line in lines if "dev" in line]
    if train:
        left.plot(*zip(*train, strict=True), alpha=0.5, linewidth=1, label="training")
    steps = [step for step, _ in held]
    left.plot(steps, [dev["loss"] for _, dev in held], marker="o", markersize=3, label="dev")
    left.set(xlabel="step", ylabel="cross-entropy, nats", title="loss")
    for name, title in zip(SCORES, ("MCC", "accuracy", "F1"), strict=True):
        right.plot(steps, [dev[name] for _, dev in held], marker="o", markersize=3, label=title)
    right.set(xlabel="step", title="dev scores")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
