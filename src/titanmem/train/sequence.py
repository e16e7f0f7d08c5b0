"""A run that trains a classifier of sequences: its config, and its rows, which lie on the device as one tensor.

An epoch is a permutation of the training rows; steps take `batch` after `batch` of one epoch after another, so that
every row is seen once an epoch and every step has the same size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from titanmem.config import Config, check_counts, check_types, require
from titanmem.data.dna import reverse_complement
from titanmem.data.labelled import Labelled, Split, read_labelled
from titanmem.models.base import read_config
from titanmem.models.language import TitansConfig
from titanmem.models.sequence import CnnConfig, SequenceClassifier, SequenceConfig
from titanmem.tasks.base import generator_of
from titanmem.train.config import RunConfig
from titanmem.train.parallel import Ranks, Spread
from titanmem.train.scores import SCORES, confusion, scores
from titanmem.train.source import Batch, Evaluation, Source

EVALUATED = 1024  # rows of one forward pass without gradients


@dataclass(frozen=True)
class SequenceData(Config):
    """Which sequences, and how a step takes them."""

    path: str = ""  # what `titanmem.data.labelled.read_labelled` reads
    columns: Sequence[str] = ("sequence", "label")  # of a table
    dev: float = 0.1  # share of the training rows that choose the best checkpoint, where there is no dev split
    batch: int = 128
    flip: bool = False  # a row is its reverse complement in half of the epochs, by chance

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "batch")
        two = isinstance(self.columns, (list, tuple)) and len(self.columns) == 2
        require(two, f'data.columns are two names, for instance ["sequence","label"], got {self.columns!r}')
        require(0 < self.dev < 1, f"data.dev is a share of the training rows in (0, 1), got {self.dev}")

    def open(self, classes: Sequence[str] | None = None) -> Labelled:
        """The sequences; `classes` are those of a model."""
        names = None if classes is None else tuple(classes)
        return read_labelled(self.path, dev=self.dev, columns=(self.columns[0], self.columns[1]), classes=names)


@dataclass(frozen=True)
class SequenceRun(RunConfig):
    """A classifier of sequences. `epochs` decide `steps`, `eval_every` (once an epoch) and the warm-up, unless those
    are given."""

    unit: ClassVar[str] = "sequences"
    loss: ClassVar[str] = "cross-entropy, and 1 − score held out"
    use: ClassVar[str] = "titanmem dna predict {} sequences.fa"

    model: SequenceConfig
    data: SequenceData = field(default_factory=SequenceData)
    epochs: int = 100
    metric: str = "mcc"  # the best checkpoint has the best of it on the dev split: mcc, accuracy, f1 or loss
    micro_rows: int = 4096
    kind: str = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs")
        known = (*SCORES, "loss")
        require(self.metric in known, f"metric is one of {', '.join(known)}, got {self.metric!r}")

    @property
    def rows(self) -> int:
        return self.data.batch

    def open_source(self) -> SequenceSource:
        return SequenceSource(self)

    def fit(self, given: Collection[str]) -> SequenceRun:
        """Classes and steps from the data; the trunk from the model that the run starts from."""
        found = self.data.open()
        require(
            "model.classes" in given or len(found.classes) > 1,
            f"{self.data.path} has the label {', '.join(found.classes)} alone; give sequences of at least two labels",
        )
        model = self.model if "model.classes" in given else replace(self.model, classes=found.classes)
        if self.init is not None and not any(name.startswith("model.trunk") for name in given):
            start = read_config(self.init)
            trunk = start.trunk if isinstance(start, SequenceConfig) else start
            require(
                isinstance(trunk, TitansConfig | CnnConfig),
                f"{self.init} holds a {type(start).__name__}; start from a model of titanmem dna pretrain or dna train",
            )
            model = replace(model, trunk=trunk)
        epoch = len(found.splits["train"]) / self.data.batch
        steps = self.steps if "steps" in given else math.ceil(epoch * self.epochs)
        optim = self.optim if "optim.warmup" in given else replace(self.optim, warmup=steps // 20)
        often: dict[str, Any] = {"eval_every": max(1, round(epoch)), "save_every": max(1, round(10 * epoch))}
        often = {name: value for name, value in often.items() if name not in given}
        return replace(self, model=model, optim=optim, steps=steps, **often)

    def prepare(self) -> None:
        self.data.open(self.model.classes)

    def write_beside(self, folder: Path, run: Path) -> None:
        about = {"path": self.data.path, "columns": list(self.data.columns), "metric": self.metric}
        (folder / "data.json").write_text(json.dumps(about, indent=1) + "\n")

    def costs(self, ranks: int) -> list[tuple[str, str]]:
        splits = self.data.open(self.model.classes).splits
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
        return [*super().costs(ranks), ("sequences", sizes), ("classes", ", ".join(self.model.classes))]


class Rows:
    """The sequences of a split on a device."""

    def __init__(self, split: Split, device: torch.device, length: int | None = None) -> None:
        split = split if length is None else split.cut(length)
        self.lengths = torch.from_numpy(split.lengths)  # on the host, which decides the shape of a batch
        self.bases = torch.from_numpy(np.append(split.bases, np.uint8(0))).to(device)  # and padding
        self.starts = torch.from_numpy(split.starts[:-1]).to(device)
        self.labels = torch.from_numpy(split.labels).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, index: Tensor) -> Batch:
        """ids [B, T], labels [B], and lengths [B] where rows differ in length; index [B] is on the host."""
        counts = self.lengths[index]
        longest, ragged = int(counts.max()), bool((counts != counts[0]).any())
        index = index.to(self.bases.device, non_blocking=True)
        place = torch.arange(longest, device=self.bases.device)
        spot = self.starts[index].unsqueeze(1) + place
        batch = {"labels": self.labels[index]}
        if ragged:
            batch["lengths"] = counts.to(self.bases.device, non_blocking=True)
            spot = torch.where(place < batch["lengths"].unsqueeze(1), spot, len(self.bases) - 1)
        return {"ids": self.bases[spot], **batch}


class SequenceSource(Source):
    """Shuffled rows, half of them from the other strand; scores on the dev split."""

    def __init__(self, config: SequenceRun) -> None:
        self.config = config
        self.found = config.data.open(config.model.classes)
        most = max(int(split.lengths.max()) for split in self.found.splits.values())
        if config.model.length is not None and most > config.model.length:
            over = sum(int((split.lengths > config.model.length).sum()) for split in self.found.splits.values())
            self.warning = f"{over:,} sequences are longer than model.length={config.model.length} and are cut there"
        self.held: dict[str, Rows] = {}

    def rows(self, split: str, device: torch.device) -> Rows:
        """A split on the device; it is copied there once."""
        if split not in self.held:
            self.held[split] = Rows(self.found.splits[split], device, self.config.model.length)
        return self.held[split]

    def batches(self, step: int, ranks: Ranks) -> Iterator[Batch]:
        rows, size = self.rows("train", ranks.device), self.config.data.batch
        count = len(rows)
        orders: dict[int, Tensor] = {}
        for number in range(step, self.config.steps):
            places = torch.arange(number * size + ranks.rank, (number + 1) * size, ranks.world)
            epochs = range(int(places[0]) // count, int(places[-1]) // count + 1)
            orders = {epoch: orders[epoch] if epoch in orders else self.order(epoch, count) for epoch in epochs}
            order = orders[epochs[0]] if len(epochs) == 1 else torch.cat(list(orders.values()), 1)
            index, flip = order[:, places - epochs[0] * count]
            batch = rows.take(index)
            if self.config.data.flip:
                other = reverse_complement(batch["ids"], batch.get("lengths"))
                batch["ids"] = torch.where(flip.bool().to(other.device).unsqueeze(1), other, batch["ids"])
            yield batch

    def order(self, epoch: int, count: int) -> Tensor:
        """The rows of an epoch in order, and whether they are flipped: [2, count]."""
        generator = generator_of(self.config.seed, epoch)
        order = torch.randperm(count, generator=generator)
        return torch.stack([order, torch.randint(0, 2, (count,), generator=generator)])

    def count(self, batch: Batch) -> int:
        return len(batch["labels"])

    def evaluate(self, spread: Spread) -> Evaluation:
        """Scores and loss on the dev split."""
        found = score_rows(spread.forward, self.rows("dev", spread.ranks.device), len(self.config.model.classes))
        value = found[self.config.metric]
        return {"held_out": value if self.config.metric == "loss" else 1 - value, "dev": found}, None

    def brief(self, found: dict[str, Any]) -> str:
        dev = found["dev"]
        return f"dev MCC {dev['mcc']:.4f}, accuracy {dev['accuracy']:.4f}, F1 {dev['f1']:.4f}, loss {dev['loss']:.4f}"


@torch.no_grad()
def score_rows(forward: Any, rows: Rows, classes: int) -> dict[str, Any]:
    """Loss, scores and confusion matrix of a model (`forward` is its call) on rows."""
    chosen, loss = [], 0.0
    for index in torch.arange(len(rows)).split(EVALUATED):
        batch = rows.take(index)
        labels = batch.pop("labels")
        found = forward(**batch)[0]
        loss -= found.gather(1, labels.unsqueeze(1)).sum().item()
        chosen.append(found.argmax(-1))
    matrix = confusion(rows.labels.cpu().numpy(), torch.cat(chosen).cpu().numpy(), classes)
    return {**scores(matrix), "loss": loss / len(rows), "rows": len(rows), "confusion": matrix.tolist()}


def caller(model: SequenceClassifier) -> Callable[..., Any]:
    """The model's call in the precision it is trained in: bf16 products on a GPU."""
    device = model.head.weight.device

    @torch.no_grad()
    def call(**inputs: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(**inputs)

    return call


def score_split(model: SequenceClassifier, split: Split) -> dict[str, Any]:
    """Scores of a trained model on the rows of a split."""
    rows = Rows(split, model.head.weight.device, model.config.length)
    return score_rows(caller(model), rows, len(model.config.classes))
