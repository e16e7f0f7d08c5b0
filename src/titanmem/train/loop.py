"""The training loop, from top to bottom: open the ranks, build, resume, then step after step.

What is trained, and on what, is the config's business: it builds the model and opens the source of the rows. Losses are
sums divided by the step's predictions over all ranks, so a step means the same however it is cut into ranks and
micro-batches. What is random, such as dropout, depends on the step alone: a run is a function of its config.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmem.config import require
from titanmem.data.prepare import locked
from titanmem.models.base import Model, load
from titanmem.state import ModelState
from titanmem.tasks.base import generator_of
from titanmem.train.checkpoint import Checkpoints, read_manifest, step_of
from titanmem.train.config import RunConfig
from titanmem.train.graphs import StepGraphs
from titanmem.train.metrics import FILE as METRICS
from titanmem.train.metrics import SAMPLES, Meter, Metrics, Pace, check_trackers
from titanmem.train.optim import make_optimizer, rate_at
from titanmem.train.parallel import Ranks, Spread, open_ranks, repeatable
from titanmem.train.provenance import provenance
from titanmem.train.source import Batch

MOST_SHOWN = 3  # settings in which two configs differ


class TrainingError(ValueError):
    """Training cannot go on; the text says why and what was kept."""


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    from_step: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train in `folder`, going on from its newest checkpoint if it has one (or from that of `from_step`).

    Returns the last evaluation with "step" and "complete", which is False if a signal stopped the run, and "best": the
    step, held_out and folder of the best checkpoint, or None. `on_step` is called with every step's number and loss.
    """
    with open_ranks() as ranks, repeatable(config.parallel.repeatable or None):
        run = Run(config, Path(folder), ranks)
        try:
            run.open(from_step)
            with Stopping() as stopping:
                return run.go(stopping, on_step or (lambda step, loss: None))
        finally:
            run.close()


class Run:
    """One run: what it is made of, and its steps."""

    def __init__(self, config: RunConfig, folder: Path, ranks: Ranks) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        self.held_open = ExitStack()  # the folder's lock, the checkpoint being written, the metrics' files

    def open(self, from_step: int | None) -> None:
        """Everything before the first step."""
        config, folder, ranks = self.config, self.folder, self.ranks
        check_trackers(config)
        self.micro = config.micro(ranks.world)  # rows of one forward pass
        ranks.first_only(lambda: self.held_open.enter_context(open_run(config, folder)))
        self.source = config.open_source()
        torch.manual_seed(config.seed)
        self.spread = Spread(first_model(config).to(ranks.device), config.parallel, ranks)
        self.optimizer = make_optimizer(self.spread.module, config.optim)
        self.checkpoints = Checkpoints(folder, ranks, config.keep)
        self.held_open.callback(self.checkpoints.settle)
        ranks.first_only(self.checkpoints.clear)
        self.step, self.saved, self.bad = 0, 0, 0
        self.lanes: list[ModelState | None] = []  # carried memories, one entry per micro-batch
        self.result: dict[str, Any] = {}  # of the last evaluation
        self.evaluated = 0
        self.best, self.waited = math.inf, 0  # the lowest held_out, and evaluations since
        self.restore(from_step)
        self.metrics = Metrics(folder, config, self.step, ranks.first)
        self.held_open.callback(self.metrics.close)
        if self.source.warning is not None:
            self.metrics.say(self.source.warning)
        self.graphs: StepGraphs | None = None
        if self.spread.graphs and not self.source.varies:
            self.graphs = StepGraphs(self.spread.learn, self.spread.module.parameters(), self.metrics.say)

    def restore(self, from_step: int | None) -> None:
        """Go on from a checkpoint, if there is one."""
        path = self.checkpoints.choose(from_step)
        if path is None:
            return
        if from_step is not None:
            self.ranks.first_only(lambda: self.checkpoints.set_aside(after=path))
        progress, files = self.checkpoints.load(path, self.spread, self.optimizer)
        self.step = self.saved = step_of(path)
        self.bad, self.waited = progress["bad"], progress.get("waited", 0)
        self.best = math.inf if progress.get("best") is None else progress["best"]
        if progress.get("held_out") is not None:
            self.result, self.evaluated = {"held_out": progress["held_out"]}, self.step
        if files:
            every = ModelState.stack([ModelState.load(file) for file in files])
            count = every.batch // self.ranks.world
            mine = every.rows(slice(self.ranks.rank * count, (self.ranks.rank + 1) * count)).to(self.ranks.device)
            size = self.micro
            self.lanes = [mine.rows(slice(first, first + size)) for first in range(0, count, size)]
        if self.ranks.first:
            print(f"going on from {path}", flush=True)

    # -- the loop -------------------------------------------------------------------------------------------------

    def go(self, stopping: Stopping, on_step: Callable[[int, float], None]) -> dict[str, Any]:
        """All steps that are left."""
        config = self.config
        meter, pace = Meter(config, self.ranks), Pace(config.steps)
        complete = True
        for batch in self.source.batches(self.step, self.ranks):
            if config.patience is not None and self.waited >= config.patience:
                self.metrics.say(f"no better evaluation among the last {self.waited}: stopped early (patience)")
                break
            count, stop = self.ranks.total(float(self.source.count(batch)), float(stopping.asked))
            if stop:
                complete = False
                break
            loss, norm = self.advance(batch, count)
            self.step += 1
            on_step(self.step, loss)
            shown = meter.add(loss, norm, rate_at(config.optim, self.step - 1, config.steps))
            self.metrics.tick(**meter.brief())
            if (slow := pace.note(self.step)) is not None:
                self.metrics.say(slow)
            if self.step % config.log_every == 0 or self.step == config.steps:
                self.metrics.record(self.step, shown())
            if self.step % config.eval_every == 0 or self.step == config.steps:
                self.evaluate()
                meter.skip()
            best = config.patience is not None and self.waited == 0 and self.evaluated == self.step
            if (self.step % config.save_every == 0 or best) and self.step < config.steps:
                self.save()
        self.finish(complete)
        return {**self.result, "step": self.step, "complete": complete, "best": self.best_checkpoint()}

    def advance(self, batch: Batch, count: float) -> tuple[float, float]:
        """One optimiser step; returns the mean loss over all ranks and the gradient's norm."""
        count = max(1.0, count)  # rows of nothing but document ends predict nothing
        torch.manual_seed(generator_of(self.config.seed, self.step, self.ranks.rank).initial_seed())
        parts = self.source.split(batch, self.micro)
        if self.source.carries and not self.lanes:
            self.lanes = [None] * len(parts)
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        scale = self.ranks.world / count  # ranks are averaged, predictions counted over all
        for index, part in enumerate(parts):
            lane = self.lanes[index] if self.lanes else None
            if self.graphs is None or (self.source.carries and lane is None):  # the first rows carry nothing yet
                with self.spread.backward(sync=index + 1 == len(parts)):
                    loss = self.forward(part, index)
                    (loss * scale).backward()
            else:
                loss, after = self.graphs(part, scale, lane)
                if after is not None:
                    self.lanes[index] = after
            total += loss.detach()
        norm = self.spread.clip(self.config.optim.clip)
        mean = self.ranks.total(total.item())[0] / count
        if math.isfinite(mean) and math.isfinite(norm):
            self.bad = 0
            self.optimizer.set_rate(rate_at(self.config.optim, self.step, self.config.steps))
            self.optimizer.step()
        else:
            self.skip(batch, mean, norm)
        self.optimizer.zero_grad() if self.graphs is None else self.graphs.clear()
        return mean, norm

    def forward(self, part: Batch, index: int) -> Tensor:
        """The summed loss of a micro-batch, with its lane of carried memories moved on."""
        inputs: dict[str, Any] = {name: x.to(self.ranks.device) for name, x in part.items()}
        loss, state = self.spread.loss(inputs, self.lanes[index] if self.source.carries else None)
        if self.source.carries:
            self.lanes[index] = state
        return loss

    def skip(self, batch: Batch, mean: float, norm: float) -> None:
        """Leave a step out whose loss or gradient is not finite; give up after several in a row."""
        self.bad += 1
        self.lanes = []
        count = f"{self.bad} of {self.config.bad_steps} in a row before stopping"
        self.metrics.skipped(self.step + 1, mean, norm, self.spread.spoilt(), count)
        if self.bad < self.config.bad_steps:
            return
        from safetensors.torch import save_file

        file = self.folder / f"bad-batch-{self.step + 1}-rank-{self.ranks.rank}.safetensors"
        save_file({name: x.contiguous() for name, x in batch.items()}, file)
        raise TrainingError(
            f"stopped: {self.bad} steps in a row were not finite, the last at step {self.step + 1}. The batch is in "
            f"{file}. Lower optim.lr, or resume from an earlier checkpoint with --from"
        )

    # -- around the steps -----------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """What the source measures, and a sample."""
        self.spread.module.eval()
        with repeatable(False if self.config.parallel.repeatable else None):  # drawing a sample has no fixed order
            result = self.source.evaluate(self.spread)
        self.spread.module.train()
        if result is None:
            return
        found, text = result
        self.result, self.evaluated = found, self.step
        self.metrics.record(self.step, found)
        self.metrics.say(f"step {self.step}: {self.source.brief(found)}")
        score = self.ranks.total(found["held_out"] if self.ranks.first else 0.0)[0]  # all decide alike
        self.waited = 0 if score < self.best else self.waited + 1
        self.best = min(self.best, score)
        if text is not None and self.ranks.first:
            with (self.folder / SAMPLES).open("a") as file:
                file.write(json.dumps({"step": self.step, **text}) + "\n")

    def save(self, wait: bool = False) -> None:
        """A checkpoint of this step."""
        fresh = self.evaluated == self.step
        progress = {"bad": self.bad, "held_out": self.result.get("held_out") if fresh else None}
        progress |= {"best": self.best if math.isfinite(self.best) else None, "waited": self.waited}
        lanes = [lane for lane in self.lanes if lane is not None]
        self.checkpoints.save(self.step, self.spread, self.optimizer, progress, lanes, wait)
        self.saved = self.step

    def best_checkpoint(self) -> dict[str, Any] | None:
        """What `titanmem export --best` would take."""
        path = self.checkpoints.best()
        if path is None:
            return None
        return {"step": step_of(path), "held_out": read_manifest(path)["progress"]["held_out"], "checkpoint": str(path)}

    def finish(self, complete: bool) -> None:
        """The last checkpoint, and what to do next."""
        if self.step > self.saved:
            self.save(wait=True)
        self.checkpoints.wait()
        self.ranks.barrier()  # all see the same checkpoints
        if self.step == 0:
            self.metrics.say("stopped before the first step; the same command starts anew")
        elif complete:
            self.metrics.say(f"done: {self.step} steps in {self.folder}. Next: titanmem plot {self.folder}")
        else:
            self.metrics.say(
                f"stopped at step {self.step}, checkpoint written. Resume: titanmem train --resume {self.folder}"
            )

    def close(self) -> None:
        self.held_open.close()


class Stopping:
    """Ctrl-C and SIGTERM ask for a checkpoint and an end after the running step; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, _: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def open_run(config: RunConfig, folder: Path) -> Iterator[None]:
    """Prepare the data and claim the folder. A folder of another config, or one that another process trains in, is
    refused."""
    with locked(folder, "another process is training in"):
        claim_folder(config, folder)
        yield


def claim_folder(config: RunConfig, folder: Path) -> None:
    """Write what the run is, once it is known that it can begin."""
    file = folder / "config.json"
    begun = (folder / "checkpoints").exists() or (folder / METRICS).exists()
    if file.exists() and begun:
        mine, held = (named_values(c.to_dict()) for c in (config, RunConfig.read(file)))
        differ = [
            f"{name} is {shorten(held.get(name))} there, {shorten(mine.get(name))} now"
            for name in dict.fromkeys((*mine, *held)) if mine.get(name) != held.get(name)
        ]  # fmt: skip
        if differ:
            more = f", and {len(differ) - MOST_SHOWN} more" if len(differ) > MOST_SHOWN else ""
            raise ValueError(
                f"{folder} holds a run with another config ({'; '.join(differ[:MOST_SHOWN])}{more}). Choose another "
                f"folder, or let it go on as it is: titanmem train --resume {folder}. A finished run is trained on by "
                "exporting it and starting another with init=FOLDER"
            )
    inside = getattr(config.data, "path", None)
    require(
        not inside or Path(inside).resolve() != folder.resolve(),
        f"data.path={inside} is the run's own folder; give the data one of their own",
    )
    config.prepare()
    config.keep_data(folder, begun)
    if not (file.exists() and begun):
        file.write_text(json.dumps(config.to_dict(), indent=1) + "\n")
    with (folder / "provenance.jsonl").open("a") as log:  # one line for every start
        log.write(json.dumps(provenance()) + "\n")


def named_values(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """All settings as JSON by their paths, as key=value names them."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= named_values(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value)
    return found


def shorten(value: str | None, most: int = 60) -> str:
    text = "nothing" if value is None else value
    return text if len(text) <= most else text[:most] + "…"


def first_model(config: RunConfig) -> Model:
    """The model before its first step: fresh, or with the weights of an exported one."""
    model = config.model.build()
    if config.init is not None:
        model.adopt(load(config.init), f"init={config.init}")
    return model
