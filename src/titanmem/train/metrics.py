"""What a run says while it runs: a progress bar, metrics.jsonl, TensorBoard where installed, Weights & Biases if asked.

One JSON object a line: {"step": 40, "loss": …, "lr": …} for training, {"step": 40, "held_out": …} for evaluation.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from titanmem.train.config import RunConfig
from titanmem.train.parallel import Ranks, peak_flops

FILE = "metrics.jsonl"
SAMPLES = "samples.jsonl"


class Metrics:
    """The first rank's records; the other ranks record nothing."""

    def __init__(self, folder: Path, config: RunConfig, first_step: int, active: bool) -> None:
        self.active = active
        if not active:
            return
        for name in (FILE, SAMPLES):
            keep_before(folder / name, first_step)
        self.file = (folder / FILE).open("a", buffering=1)
        self.bar = open_bar(config.steps, first_step)
        self.shown: dict[str, str] = {}
        self.board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        self.wandb: Any = None
        if config.wandb is not None:
            self.wandb = _open_wandb(config, folder)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Write one line, and every number in it to the other places."""
        if not self.active:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.bar.disable and "loss" in values:  # no terminal: a line in the log instead of a bar
            self.say(f"step {step}: " + ", ".join(f"{name} {value}" for name, value in self.shown.items()))
        numbers = dict(flatten(values))
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def tick(self, **shown: str) -> None:
        """One step further."""
        if self.active:
            self.shown = shown
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def skipped(self, step: int, loss: float, norm: float, gradients: Sequence[str], count: str) -> None:
        """A step was left out, where something was not finite: the loss, or the gradients of these parameters."""
        more = f" and {len(gradients) - 3} more" if len(gradients) > 3 else ""
        named = f"; the gradients of {', '.join(gradients[:3])}{more}" if gradients else ""
        self.say(f"step {step}: loss {loss}, gradient norm {norm}: not finite, step skipped ({count}){named}")
        self.record(step, {"skipped": list(gradients)})

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.active and self.bar.disable:
            print(text, file=sys.stderr, flush=True)
        elif self.active:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self.active:
            self.bar.close()
            self.file.close()
            if self.board is not None:
                self.board.close()
            if self.wandb is not None:
                self.wandb.finish()


class NoBar:
    """Where tqdm is not installed: lines instead of a bar."""

    disable = True

    def set_postfix(self, *_: Any, **__: Any) -> None: ...
    def update(self) -> None: ...
    def close(self) -> None: ...


def open_bar(steps: int, first_step: int) -> Any:
    """A progress bar in a terminal."""
    if importlib.util.find_spec("tqdm") is None:
        return NoBar()
    from tqdm import tqdm

    return tqdm(
        total=steps, initial=first_step, unit="step", dynamic_ncols=True, file=sys.stderr,
        disable=not sys.stderr.isatty(), leave=False,
    )  # fmt: skip


class Pace:
    """What is left takes hours: said once, when the first steps of a start have shown it."""

    FIRST, STEPS, LONG = 1, 2, 3600.0  # steps that are not counted, steps that are, seconds

    def __init__(self, steps: int) -> None:
        self.steps, self.seen, self.begin = steps, 0, 0.0

    def note(self, step: int) -> str | None:
        """A step is over."""
        self.seen += 1
        if self.seen == self.FIRST:
            self.begin = time.perf_counter()
        if self.seen != self.FIRST + self.STEPS:
            return None
        each = (time.perf_counter() - self.begin) / self.STEPS
        left = (self.steps - step) * each
        if left < self.LONG:
            return None
        return (
            f"a step takes {each:.3g} s: the {self.steps - step:,} that are left take about {left / 3600:.1f} hours. "
            "It can be stopped at any time and go on; another folder with steps=N, or a smaller model, takes less"
        )


class Meter:
    """Speed and means since the last record."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self.amount, self.unit, self.flops = config.amount, config.unit, config.flops
        self.peak = peak_flops(ranks.device) * ranks.world if self.flops else 0.0
        self.skip()

    def skip(self) -> None:
        """Start anew: the time until now is not the steps'."""
        self.begin, self.speed = time.perf_counter(), 0.0  # steps per second
        self.losses: list[float] = []

    def add(self, loss: float, norm: float, rate: float) -> Callable[[], dict[str, Any]]:
        """Note a step; returns a function that makes the record and starts anew."""
        self.losses.append(loss)
        self.speed = len(self.losses) / (time.perf_counter() - self.begin)

        def record() -> dict[str, Any]:
            values = {"loss": sum(self.losses) / len(self.losses), "grad_norm": norm, "lr": rate, **self.numbers()}
            self.begin, self.losses = time.perf_counter(), []
            return values

        return record

    def numbers(self) -> dict[str, float]:
        used = {"mfu": self.speed * self.flops / self.peak} if self.flops else {}
        return {f"{self.unit}_per_s": self.speed * self.amount, **used, "memory_gib": memory_gib()}

    def brief(self) -> dict[str, str]:
        """For the progress bar."""
        now = self.numbers()
        shown = {"loss": f"{self.losses[-1]:.3f}" if self.losses else "–"}
        shown[f"{self.unit}/s"] = f"{now[f'{self.unit}_per_s']:,.0f}"
        if "mfu" in now:
            shown["mfu"] = f"{now['mfu']:.0%}"
        return {**shown, "GiB": f"{now['memory_gib']:.1f}"}


def memory_gib() -> float:
    """Peak memory of the GPU, or of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """All numbers of a nested record with their paths."""
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found.append((prefix + name, float(value)))
    return found


def keep_before(path: Path, step: int) -> None:
    """Drop the lines from `step` on, and a last line that a kill cut off: a resumed run writes them again."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    aside = path.with_suffix(".part")
    aside.write_text("".join(kept))
    aside.replace(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl or samples.jsonl without damaged ones, such as a last one that a kill cut off."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def check_trackers(config: RunConfig) -> None:
    """Whether what the config asks for is installed."""
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb=… asks for Weights & Biases, which is not installed; pip install wandb, or drop it")


def _open_wandb(config: RunConfig, folder: Path) -> Any:
    import wandb

    return wandb.init(project=config.wandb, name=folder.name, dir=folder, config=config.to_dict(), resume="allow")
