"""Where a run's rows come from and what it is evaluated on: what the loop asks, and the answers of text and tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from titanmem.config import require
from titanmem.data.loader import held_out_rows, open_loader
from titanmem.data.shards import Index, TokenShards
from titanmem.data.tokenizer import load_tokenizer
from titanmem.models.cost import PLAIN
from titanmem.ops.loss import IGNORED
from titanmem.tasks.base import accuracy, generator_of, share
from titanmem.train.config import TrainConfig
from titanmem.train.data import make_task
from titanmem.train.evaluate import held_out, sample, token_losses
from titanmem.train.parallel import Ranks, Spread

Batch = dict[str, Tensor]  # by the names of the model's arguments, rows first
Evaluation = tuple[dict[str, Any], dict[str, str] | None]  # numbers, and "prompt" and "text" of a sample


class Source(ABC):
    """Everything about a run's data. What it gives depends on its config, the step and the ranks alone."""

    warning: str | None = None  # what is said before the first step
    carries = False  # the model's states go on from step to step, row by row
    varies = False  # what is computed depends on the rows' values, not on their shape alone

    @abstractmethod
    def batches(self, step: int, ranks: Ranks) -> Iterator[Batch]:
        """This rank's rows of every step that is left."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """Predictions in a batch: what the summed loss is divided by."""

    @abstractmethod
    def evaluate(self, spread: Spread) -> Evaluation | None:
        """What is measured, on every rank the same: "held_out", the lower the better, by which the best checkpoint is
        chosen, and whatever else is to be recorded. None if nothing is held out."""

    def split(self, batch: Batch, rows: int) -> list[Batch]:
        """Micro-batches of at most `rows` rows."""
        cuts = {name: x.split(rows) for name, x in batch.items()}
        return [dict(zip(cuts, parts, strict=True)) for parts in zip(*cuts.values(), strict=True)]

    def brief(self, found: dict[str, Any]) -> str:
        """An evaluation in a few words."""
        return f"held-out loss {found['held_out']:.4f}"


class TokenSource(Source):
    """Rows of tokens: text, or a task."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] >= 0).sum())

    def split(self, batch: Batch, rows: int) -> list[Batch]:
        """Shorter rows make larger micro-batches."""
        return super().split(batch, rows * (self.config.data.length // batch["ids"].shape[1]))


class TextSource(TokenSource):
    """Rows of token shards; held-out documents."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.carries, self.varies = config.data.carry, config.data.reset  # documents begin anywhere
        self.shards = TokenShards(config.data.path, "train")
        index = Index.load(Path(config.data.path))
        self.held = TokenShards(config.data.path, "held") if index.splits.get("held") else None
        self.tokenizer = load_tokenizer(Path(config.data.path) / "tokenizer")
        if self.held is None:
            self.warning = f"no held-out loss, no samples: {index.why_none_held(config.data.path)}"

    def batches(self, step: int, ranks: Ranks) -> Iterator[Batch]:
        """This rank's rows of every step that is left."""
        config, data = self.config, self.config.data
        changes = sorted(first for first, _ in data.lengths if first > step)
        for until in [*(min(c, config.steps) for c in changes), config.steps]:
            if until <= step:
                continue
            loader = open_loader(
                self.shards, batch=config.rows, length=data.length, rank=ranks.rank, world=ranks.world,
                first_step=step, align=config.align, reset=data.reset, carry=data.carry, seed=config.seed,
                workers=data.workers, pieces=data.length // data.length_at(step),
            )  # fmt: skip
            for number, batch in enumerate(islice(loader, until - step), step):
                yield batch if data.carry_rows is None else batch | {"anew": self.begin_anew(number, ranks)}
            step = until

    def begin_anew(self, step: int, ranks: Ranks) -> Tensor:
        """Which of this rank's rows leave their memory behind. They take turns: a step has memories of every age."""
        rows, every = self.config.rows, self.config.data.carry_rows
        assert every is not None
        mine = torch.arange(ranks.rank * rows // ranks.world, (ranks.rank + 1) * rows // ranks.world)
        return (step + mine) % every == 0

    def evaluate(self, spread: Spread) -> Evaluation | None:
        """Held-out loss by position and the memory's numbers; a sample."""
        if self.held is None:
            return None
        config = self.config
        length = config.eval_length or 2 * config.data.length
        rows = held_out_rows(self.held, length, min(config.eval_rows, self.held.documents))
        found = held_out(spread, rows, min(length, config.data.length))
        if not config.sample_tokens:
            return found, None
        return found, sample(spread, self.tokenizer, rows["ids"][0, :64], config.sample_tokens)


class TaskSource(TokenSource):
    """Rows of a task, one level a step; its test levels."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        assert config.task is not None
        self.settings, self.task = config.task, make_task(config)

    def batches(self, step: int, ranks: Ranks) -> Iterator[Batch]:
        """This rank's rows of every step that is left: each step draws one of the stage's levels."""
        mine = slice(ranks.rank, None, ranks.world)
        for number in range(step, self.config.steps):
            generator = generator_of(self.config.seed, number)
            levels = self.settings.levels_at(number)
            level = levels[int(torch.randint(0, len(levels), (), generator=generator))]
            count = self.config.batch_tokens // level["length"]
            require(
                count >= ranks.world, f"batch_tokens={self.config.batch_tokens} give {ranks.world} ranks no row each"
            )
            rows = self.task.batch(count // ranks.world * ranks.world, level, generator)
            yield {"ids": self.filled(rows.ids[mine], 0), "labels": self.filled(rows.targets[mine], IGNORED)}

    def filled(self, x: Tensor, value: int) -> Tensor:
        """Rows of several chunks filled up to whole ones, for which the memory has its fastest kernels; nothing looks
        ahead, so what is behind a row changes nothing."""
        length = self.config.model.memory_config().chunk_len
        return pad(x, (0, -x.shape[1] % length), value=value) if x.shape[1] > length else x

    @torch.no_grad()
    def evaluate(self, spread: Spread) -> Evaluation:
        """Loss on fresh rows of the last stage, and the accuracy at every test level."""
        levels = self.settings.levels_at(self.config.steps)
        losses = [self.try_level(spread, level)["loss"] for level in levels]
        tests = [{**level, **self.try_level(spread, level)} for level in self.settings.tests]
        return {"held_out": sum(losses) / len(losses), "tests": tests}, None

    def brief(self, found: dict[str, Any]) -> str:
        """With the accuracies by length."""
        lengths: dict[int, list[float]] = {}
        for test in found["tests"]:
            lengths.setdefault(test["length"], []).append(test["accuracy"])
        shown = [f"{length}: {sum(each) / len(each):.3f}" for length, each in lengths.items()]
        return super().brief(found) + (f"; accuracy by length {', '.join(shown)}" if shown else "")

    @property
    def at_once(self) -> int:
        """Tokens that an evaluation reads at once: no more than a step."""
        return min(self.config.data.length * self.config.micro_rows, self.config.batch_tokens)

    @property
    def bounded(self) -> bool:
        """Whether the state of a row stays small however long it is, so that all rows can be read side by side."""
        model = self.config.model
        grows = {*PLAIN} - {"rmt"} - ({"attention"} if model.attention_window else set())
        return not grows & {*model.blocks}

    def read(self, spread: Spread, ids: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and targets of rows, piece by piece with the state carried on."""
        unit = math.lcm(self.config.model.memory_config().chunk_len, self.config.model.segment_len)
        piece = max(1, self.at_once // len(ids) // unit) * unit if self.bounded else ids.shape[1]
        state = None
        for part, asked in zip(ids.split(piece, 1), targets.split(piece, 1), strict=True):
            logits, state = spread.forward(part, state)
            yield logits, asked

    def try_level(self, spread: Spread, level: dict[str, Any]) -> dict[str, float]:
        """Loss per question, share of right answers with its standard error, share of rows whose answers are all
        right."""
        generator = generator_of(self.config.seed, -1, level["length"])
        rows, most = self.settings.test_rows, max(1, self.at_once // level["length"])
        drawn = [self.task.batch(min(most, rows - first), level, generator) for first in range(0, rows, most)]
        every = (torch.cat(x).to(spread.ranks.device) for x in zip(*drawn, strict=True))
        groups = (x.split(rows if self.bounded else most) for x in every)
        loss, found = 0.0, []
        for ids, targets in zip(*groups, strict=True):
            counts = torch.zeros(2, len(ids), dtype=torch.int64, device=ids.device)
            for logits, asked in self.read(spread, ids, targets):
                loss += token_losses(logits, asked).sum().item()
                counts += torch.stack(accuracy(logits.argmax(-1), asked))
            found.append(counts)
        right, asked = torch.cat(found, 1).cpu()
        score, error = share(right, asked)
        exact = (right == asked).double().mean().item()
        return {"loss": loss / int(asked.sum()), "accuracy": score, "stderr": error, "exact": exact}
