"""Language models on long held-out documents: the loss by position, far beyond the length of training.

Of the held-out documents that are long enough every other one is for validation, the rest for the test. Each is cut
into stretches of the test's length, every one read from a fresh state to its end with the state carried on. Validation
looks at positions within the length of training alone, and chooses the learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanmem.bench import search
from titanmem.bench.job import TrainingJob, device
from titanmem.bench.record import RunRecord, mean_and_deviation, ordered
from titanmem.config import require
from titanmem.data.shards import Index, TokenShards
from titanmem.data.tokenizer import Tokenizer
from titanmem.recipes.language import ABLATED, COMPARED, COMPARED_FLA, DEEP, language_run
from titanmem.recipes.models import CONVOLVED, TRANSFORMERS
from titanmem.train.config import RunConfig, TrainConfig
from titanmem.train.data import tokenizer_of
from titanmem.train.evaluate import memory_work, token_losses
from titanmem.train.export import load_run

ORDER = (*dict.fromkeys((*ABLATED, *COMPARED, *CONVOLVED, *DEEP, *COMPARED_FLA)),)  # of rows
TEST_LENGTH = {"tiny": 256, "small": 32_768, "paper": 32_768}
STRETCHES, DOCUMENTS = 4, 8  # of a document, of a part
ROWS, PIECE = 8, 2048  # read at once
FIRST = 64  # the end of the first range of positions; the others double
CONDITIONS = {"fresh": "emptied every window", "frozen": "warm, frozen", "learning": "warm, learning"}
OWN = ("data", "scale", "size", "test_length", "kinds", "haystack")  # settings of the experiment, not of the run


@dataclass(frozen=True, kw_only=True)
class LanguageJob(TrainingJob):
    """A model on a text with a learning rate, which is one of the settings."""

    table: str = "language"  # or depth, ablation
    source: str  # what `titanmem data prepare` reads
    text: str  # the folder of its tokens

    @property
    def experiment(self) -> str:
        return self.table

    @property
    def name(self) -> str:
        return f"{self.variant}-lr{self.settings[search.RATE]:g}-{self.seed}"

    @property
    def scale(self) -> str:
        return str(self.settings.get("scale", "small"))

    @property
    def test_length(self) -> int:
        return int(self.settings.get("test_length", TEST_LENGTH[self.scale]))

    @property
    def weight(self) -> float:
        """Deep memories have no kernels; segments come one after another."""
        own = {"depth3": 4.0, "depth4": 5.0, "mac": 2.0, **dict.fromkeys((*TRANSFORMERS, *CONVOLVED), 0.5)}
        return own.get(self.model, 1.0)

    def config(self) -> TrainConfig:
        own = {"data.source": self.source, "data.path": self.text}
        own |= {name: value for name, value in self.settings.items() if name not in OWN}
        run = language_run(self.model, self.scale, self.settings.get("size"))
        return run.change({**own, "seed": self.seed}).fit(own)

    @property
    def twin(self) -> Path | None:
        """Where the same run of the experiment `language` would be stored."""
        return None if self.table == "language" else self.out.parent / "language" / self.file.name

    def run(self, beside: int) -> RunRecord | None:
        """The twin is taken over where it is stored."""
        twin = self.twin
        if twin is not None and twin.exists():
            held = RunRecord.read(twin)
            if held.settings == self.settings:
                record = replace(held, experiment=self.table)
                record.write(self.file)
                return record
        return super().run(beside)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(config, TrainConfig)
        tokenizer = tokenizer_of(config)
        assert tokenizer is not None
        model = load_run(self.folder)[0].to(device()).eval()
        dev, test = (Stretches.open(config.data.path, self.test_length, part) for part in ("dev", "test"))
        length = min(config.data.length, self.test_length)
        losses = read_losses(model, test.ids, test.labels)
        own = read_losses(model, dev.ids[:, :length], dev.labels[:, :length])
        metrics = {
            "dev_loss": own.mean().item(),
            "loss": losses.mean().item(),
            "bits_per_byte": losses.sum().item() / math.log(2) / test.bytes_of(tokenizer),
            "length": length,
            **conditions(model, test, config.model.window_len or length),
        }
        return {
            "levels": levels(losses, test.documents),
            "score": "loss",
            "metrics": metrics,
            "tokens": config.tokens,
        }

    def brief(self, record: RunRecord) -> str:
        near, far = (at(record, place) for place in (int(record.metrics["length"]), None))
        return (
            f"{record.minutes:.1f} minutes, loss in validation {record.metrics['dev_loss']:.4f}, test "
            f"{near:.4f} at the length of training, {far:.4f} at {record.levels[-1]['level']['position']:,}"
        )


@dataclass(frozen=True)
class Stretches:
    """Rows of held-out text [R, T] and which document each is of."""

    ids: Tensor
    labels: Tensor
    documents: list[int]

    @staticmethod
    def open(folder: str, length: int, part: str) -> Stretches:
        """Those of "dev" or "test"."""
        splits = Index.load(Path(folder)).splits
        shards = TokenShards(folder, "held") if splits.get("held") else None
        places = [] if shards is None else _long_documents(shards, length)
        require(
            shards is not None and len(places) >= 2,
            f"{folder} has {len(places)} held-out documents of more than {length:,} tokens, two are needed; give a "
            "text of longer or more documents, or a smaller --test-length",
        )
        assert shards is not None
        rows, documents = [], []
        for document, (number, begin, size) in enumerate(places[part == "dev" :: 2][:DOCUMENTS]):
            for first in range(begin, begin + min(STRETCHES, (size - 1) // length) * length, length):
                rows.append(torch.from_numpy(shards.read(number, first, first + length + 1).astype(np.int64)))
                documents.append(document)
        whole = torch.stack(rows)
        return Stretches(whole[:, :-1], whole[:, 1:], documents)

    def bytes_of(self, tokenizer: Tokenizer) -> int:
        """Bytes of the text that is predicted."""
        if tokenizer.kind == "bytes":
            return self.labels.numel()
        return sum(len(tokenizer.decode(row).encode()) for row in self.labels.tolist())


def _long_documents(shards: TokenShards, length: int) -> list[tuple[int, int, int]]:
    """Shard, begin and size of the documents of more than `length` tokens, the longest first."""
    found = []
    for number in range(len(shards.shards)):
        bounds = shards.bounds(number)
        found += [(number, int(b), int(e - b)) for b, e in pairwise(bounds) if e - b > length]
    return sorted(found, key=lambda place: (-place[2], place))


def _half(at: torch.device) -> AbstractContextManager[Any]:
    """The precision of training."""
    return torch.autocast(at.type, torch.bfloat16, enabled=at.type == "cuda")


@torch.no_grad()
def read_losses(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token [R, T], rows read in pieces with their state carried on."""
    where = next(model.parameters()).device
    rows = []
    for first in range(0, len(ids), ROWS):
        state, parts = None, []
        for begin in range(0, ids.shape[1], PIECE):
            part = slice(first, first + ROWS), slice(begin, begin + PIECE)
            with _half(where):
                logits, state = model(ids[part].to(where), state)
            parts.append(token_losses(logits, labels[part].to(where)).cpu())
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def conditions(model: Any, test: Stretches, window: int) -> dict[str, float]:
    """Does the memory do the work? Fresh, frozen and learning, on the first stretches."""
    length = min(test.ids.shape[1], 8192)
    where = next(model.parameters()).device
    ids, labels = (x[:ROWS, :length].to(where) for x in (test.ids, test.labels))
    with _half(where):
        found = memory_work(model, {"ids": ids, "labels": labels}, min(PIECE, length // 2), window)
    return {name: found[name] for name in CONDITIONS}


def levels(losses: Tensor, documents: Sequence[int]) -> list[dict[str, Any]]:
    """Mean loss of positions 0–63, 64–127, 128–255, … with its standard error over documents; a level is called by the
    end of its range."""
    found, begin, end = [], 0, FIRST
    while begin < losses.shape[1]:
        rows = losses[:, begin:end].double().mean(1).tolist()
        each = [statistics.mean(x for x, d in zip(rows, documents, strict=True) if d == n) for n in set(documents)]
        error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
        place = {"position": min(end, losses.shape[1])}
        found.append({"level": place, "loss": statistics.mean(each), "stderr": error, "rows": len(each)})
        begin, end = end, 2 * end
    return found


def chosen(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of every model with the learning rate that validation likes best."""
    return search.chosen(records, lambda record: record.variant, lambda record: record.metrics["dev_loss"])


def by_model(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The seeds of every model, in the order of the tables."""
    names = ordered((record.variant for record in records), ORDER)
    return {name: [record for record in records if record.variant == name] for name in names}


def at(record: RunRecord, position: int | None = None) -> float:
    """The loss of the range that ends at a position, or of the last."""
    last = record.levels[-1]
    return float(next((e for e in record.levels if e["level"]["position"] == position), last)["loss"])


def positions(records: Sequence[RunRecord]) -> list[int]:
    """The ends of all ranges."""
    return sorted({entry["level"]["position"] for record in records for entry in record.levels})


def table(records: Sequence[RunRecord]) -> list[str]:
    """Markdown: the loss of every model by position, in bold the lowest of those that are of one size."""
    places, models = positions(records), by_model(records)
    cells = {
        (name, place): [e["loss"] for run in runs for e in run.levels if e["level"]["position"] == place]
        for name, runs in models.items() for place in places
    }  # fmt: skip
    size = {name: runs[0].parameters for name, runs in models.items()}

    def best(name: str, place: int) -> float | None:
        """The lowest loss of the models of this one's size; None: it is the only one."""
        equal = [other for other in models if abs(size[other] / size[name] - 1) < 0.1 and cells[other, place]]
        return min(statistics.mean(cells[other, place]) for other in equal) if len(equal) > 1 else None

    lines = [f"| loss up to position | {' | '.join(f'{place:,}' for place in places)} | bits a byte | lr |"]
    lines.append("|---|" + "---|" * (len(places) + 2))
    for name, runs in models.items():
        row = []
        for place in places:
            found = cells[name, place]
            text = mean_and_deviation(found, 3) if found else ""
            bold = found and statistics.mean(found) == best(name, place)
            row.append(f"**{text}**" if bold else text)
        row.append(mean_and_deviation([run.metrics["bits_per_byte"] for run in runs], 3))
        lines.append(f"| {name} | {' | '.join(row)} | {runs[0].settings[search.RATE]:g} |")
    return lines


def work_table(records: Sequence[RunRecord]) -> list[str]:
    """Markdown: what the memory does for every model; a model of attention alone is the fourth number."""
    lines = [f"| loss on the second half | {' | '.join(CONDITIONS.values())} |", "|---|" + "---|" * len(CONDITIONS)]
    for name, runs in by_model(records).items():
        cells = [mean_and_deviation([run.metrics[kind] for run in runs], 3) for kind in CONDITIONS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def look(index: int) -> dict[str, Any]:
    """Colour and style of a model's line, the same in all pictures beside each other."""
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":", "-.")[index // 10 % 4]}


def draw_positions(axis: Any, records: Sequence[RunRecord]) -> None:
    """The loss by position, a line for every model; bars are the deviation over seeds, or a single seed's standard
    error over documents. What is lost beyond the length of training leaves the picture, so that the others can be told
    apart."""
    trained, within = int(records[0].metrics["length"]), []
    for index, (name, runs) in enumerate(by_model(records).items()):
        middle, means, bars = [], [], []
        for number, entry in enumerate(runs[0].levels):
            scores = [run.levels[number]["loss"] for run in runs if number < len(run.levels)]
            middle.append(entry["level"]["position"])
            means.append(statistics.mean(scores))
            bars.append(statistics.stdev(scores) if len(scores) > 1 else entry["stderr"])
        axis.errorbar(middle, means, bars, marker="o", markersize=3, capsize=2, lw=1.2, label=name, **look(index))
        within += [mean for place, mean in zip(middle, means, strict=True) if place <= trained]
    axis.set_ylim(top=min(axis.get_ylim()[1], max(within) + 0.2 * (max(within) - min(within))))
    axis.axvline(trained, color="0.5", lw=1, linestyle=":")
    axis.annotate(" trained up to here", (trained, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    places = positions(records)
    axis.set_xscale("log")
    axis.set_xticks(places, [f"{place:,}" for place in places], rotation=45)
    axis.minorticks_off()
    axis.set(xlabel="position in the document", ylabel="loss, nats a token", title="held-out loss by position")
