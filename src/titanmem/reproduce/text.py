"""Language models on text: the paper's Table 1 (language), Figures 7 and 8 (depth), Table 5 (ablation), and Figure 9,
their speed (throughput)."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from titanmem.bench import language, speed
from titanmem.bench.job import Job
from titanmem.bench.language import FIRST, LanguageJob, Stretches
from titanmem.bench.record import RunRecord, mean_and_deviation
from titanmem.bench.search import RATE, Search
from titanmem.bench.speed import PEERS, SpeedJob
from titanmem.config import require
from titanmem.eval.published import PUBLISHED, beside
from titanmem.models.sizes import SIZES
from titanmem.recipes.language import ABLATED, COMPARED, COMPARED_FLA, DEEP, language_run, language_sizes
from titanmem.recipes.models import CONVOLVED
from titanmem.reproduce.experiment import Experiment, SearchedExperiment
from titanmem.train.plots import new_figure

RATES = (1e-3, 2e-3, 4e-3)
TITLES = {
    "lmm": "LMM", "linear": "linear memory", "no_conv": "no convolution", "no_momentum": "no momentum",
    "no_forget": "no weight decay", "no_persistent": "no persistent memory", "mac": "+ attention: MAC",
    "mag": "+ attention: MAG", "mal": "+ attention: MAL",
}  # fmt: skip
SHAPES = [(16, 2048), (8, 4096), (4, 8192), (2, 16_384), (1, 32_768)]
CPU_SHAPES = [(4, 512), (2, 1024), (1, 2048)]
TINY_SHAPES = [(2, 64), (1, 128)]


def with_fla() -> bool:
    """Whether layers of flash-linear-attention run here."""
    return importlib.util.find_spec("fla") is not None and torch.cuda.is_available()


class TextExperiment(SearchedExperiment):
    """Models of one size on one text, each with its own learning rate."""

    paper_size: ClassVar[str] = "340m"
    compared: ClassVar[Sequence[str]]

    @property
    def source(self) -> str:
        """The text; where none is given, the Python library, or at the paper's scale its own."""
        given = self.request.data
        if given is None:
            return language_run("lmm", "paper").data.source if self.scale == "paper" else "python"
        return str(Path(given).resolve()) if Path(given).exists() else given

    @property
    def models(self) -> list[str]:
        return self.pick(self.request.models, self.compared, self.compared, self.compared)

    @property
    def size(self) -> str:
        """Of the models."""
        sizes = language_sizes(self.scale)
        size = str(self.request.more.get("size") or (self.paper_size if self.scale == "paper" else sizes[0]))
        require(size in sizes, f"--size at the scale {self.scale} is one of {', '.join(sizes)}, got {size!r}")
        return size

    @property
    def paper_rates(self) -> list[float]:
        return [SIZES[self.size].learning_rate] if self.scale == "paper" else []

    @property
    def own(self) -> dict[str, Any]:
        """How its settings say which scale and size this is."""
        if self.scale == "paper" or self.size != language_sizes(self.scale)[0]:
            return {"scale": self.scale, "size": self.size}
        return {} if self.scale == "small" else {"scale": self.scale}

    def shared(self, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """A size that is not the scale's own is a label in the tables."""
        found = super().shared(settings)
        if self.scale == "small" and "size" in self.own:
            found["label"] = "-".join(filter(None, (self.size, found["label"])))
        return found

    @cached_property
    def search(self) -> Search[str]:
        own: dict[str, Any] = {"data": Path(self.source).name, **self.own}
        length = self.request.more.get("test_length")
        if length is not None:
            require(length >= 2 * FIRST, f"--test-length is {2 * FIRST} tokens or more, got {length}")
            own["test_length"] = length
        shared = self.shared(own)
        shared |= {"source": self.source, "text": str(self.runs / "text"), "table": self.name}
        settings = shared.pop("settings")
        require(RATE not in settings, "the learning rates are given as --rates 1e-3,2e-3")

        def make(model: str, rate: float, seed: int) -> LanguageJob:
            return LanguageJob(model=model, seed=seed, settings={**settings, RATE: rate}, **shared)

        return Search(
            make=make,
            cell=lambda record: record.model,
            loss=lambda record: record.metrics["dev_loss"],
            cells=self.models,
            rates=self.pick(self.request.rates, RATES[1:2], RATES, self.paper_rates),
            seeds=self.seeds((0, 1), (0,)),
        )

    def check(self) -> None:
        """Prepare the tokens once, for all."""
        super().check()
        left = [job for job in [*self.jobs(), *self.later()] if not job.done()]
        if left:
            first = left[0]
            assert isinstance(first, LanguageJob)
            config = first.config()
            config.prepare()
            for part in ("dev", "test"):
                Stretches.open(config.data.path, first.test_length, part)

    def records(self) -> list[RunRecord]:
        return [record for record in super().records() if record.score == "loss"]

    def chosen(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        found = language.chosen([record for record in records if record.score == "loss"])
        require(bool(found), f"no trained model is stored in {self.out}; the logs are in {self.runs}")
        return found

    def table(self, records: Sequence[RunRecord]) -> str:
        found = self.chosen(records)
        note = [
            "Loss in nats a token over held-out documents, each range of positions ending where the column says; ± is "
            f"the deviation over seeds. Trained on rows of {int(found[0].metrics['length']):,} tokens. The largest "
            f"standard error over documents is {max(e['stderr'] for run in found for e in run.levels):.3f}."
        ]
        return "\n".join([*language.table(found), "", *note, "", *language.work_table(found)])

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        """Loss by position, and of one seed the training loss."""
        found = self.chosen(records)
        drawn, (left, right) = new_figure(2, width=5.6, height=4.4)
        language.draw_positions(left, found)
        for index, runs in enumerate(language.by_model(found).values()):
            right.plot(*zip(*runs[0].curve, strict=True), lw=1, **language.look(index))
        right.set(xlabel="step", yscale="log", title="training loss, nats a token")
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter("{x:g}")
        drawn.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=8)
        return drawn


class Language(TextExperiment):
    name = stored = "language"
    compared = COMPARED

    @property
    def models(self) -> list[str]:
        peers = COMPARED_FLA if with_fla() else ()
        return self.pick(self.request.models, COMPARED, (*COMPARED, *CONVOLVED, *peers), (*COMPARED, *peers))

    def table(self, records: Sequence[RunRecord]) -> str:
        return "\n".join([super().table(records), "", *beside("language")])


class Depth(TextExperiment):
    name = stored = "depth"
    paper_size = "170m"
    compared = DEEP

    @property
    def models(self) -> list[str]:
        return self.pick(self.request.models, DEEP[:2], DEEP, DEEP)

    def alone(self) -> list[Job]:
        own = {"scale": self.scale, **self.own}
        full = SHAPES if torch.cuda.is_available() else CPU_SHAPES
        shared = {
            **self.shared(own),
            "table": self.name,
            "shapes": self.option("shapes", TINY_SHAPES, full, full),
            "repeats": 2 if self.scale == "tiny" else 10,
        }
        return [SpeedJob(model=model, seed=0, **shared) for model in self.models]

    def records(self) -> list[RunRecord]:
        return Experiment.records(self)

    def speeds(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        return [record for record in records if record.score == speed.SCORE]

    def table(self, records: Sequence[RunRecord]) -> str:
        found = self.speeds(records)
        return "\n".join([super().table(records), *(["", *speed.table(found, DEEP)] if found else [])])

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        found = self.speeds(records)
        drawn, axes = new_figure(2 if found else 1, width=5.6, height=4.4)
        language.draw_positions(axes[0], self.chosen(records))
        axes[0].legend(frameon=False, fontsize=8)
        if found:
            speed.draw(axes[1], found, DEEP)
            axes[1].legend(frameon=False, fontsize=8)
        return drawn


class Ablation(TextExperiment):
    name = stored = "ablation"
    paper_size = "400m"
    compared = ABLATED

    def table(self, records: Sequence[RunRecord]) -> str:
        found = self.chosen(records)
        models, published = language.by_model(found), PUBLISHED["ablation"][1]
        near, far = int(found[0].metrics["length"]), language.positions(found)[-1]
        lines = [f"| | loss up to {near:,} | up to {far:,} | bits a byte | lr | *published* |", "|" + "---|" * 6]
        for name, runs in models.items():
            losses = [[language.at(run, place) for run in runs] for place in (near, far)]
            losses.append([run.metrics["bits_per_byte"] for run in runs])
            title = TITLES.get(name, name)
            cells = " | ".join(mean_and_deviation(values, 3) for values in losses)
            lines.append(f"| {title} | {cells} | {runs[0].settings[RATE]:g} | {published.get(title, '')} |")
        note = f"± is the deviation over seeds. Published: {PUBLISHED['ablation'][0]}."
        return "\n".join([*lines, "", note])

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        """How much worse than the LMM each is, at the length of training and far beyond it; a dot for every seed."""
        found = self.chosen(records)
        models = language.by_model(found)
        near, far = int(found[0].metrics["length"]), language.positions(found)[-1]
        drawn, axes = new_figure(2, width=5.2, height=0.9 + 0.34 * len(models))
        colours = ["C1" if name in ("mac", "mag", "mal") else "C0" for name in models]
        for axis, place in zip(axes, (near, far), strict=True):
            losses = {name: [language.at(run, place) for run in runs] for name, runs in models.items()}
            zero = statistics.mean(losses.get("lmm") or min(losses.values()))
            rows = [[loss - zero for loss in values] for values in losses.values()]
            axis.barh(range(len(rows)), [statistics.mean(values) for values in rows], color=colours, alpha=0.75)
            for row, values in enumerate(rows):
                axis.plot(values, [row] * len(values), ".", color="black", markersize=4)
            axis.axvline(0, color="0.3", lw=0.8)
            axis.set_yticks(range(len(rows)), [TITLES.get(name, name) for name in models] if axis is axes[0] else [])
            axis.invert_yaxis()
            axis.set(xlabel="loss beside the LMM's, nats a token", title=f"up to position {place:,} (LMM {zero:.3f})")
        return drawn


class Throughput(Experiment):
    name = stored = "throughput"
    order = (*COMPARED, *PEERS)
    small_is_paper = True

    def jobs(self) -> list[Job]:
        return []

    def alone(self) -> list[Job]:
        peers = [name for name in PEERS if name != "fla_transformer" or importlib.util.find_spec("flash_attn")]
        there = (*COMPARED, *(peers if with_fla() else ()))
        models = self.pick(self.request.models, ("lmm", "attention"), there, there)
        tiny = self.scale == "tiny"
        own: dict[str, Any] = {"scale": "tiny"} if tiny else {"scale": "paper"}
        own |= {} if tiny else {"size": self.request.more.get("size") or "340m"}
        shared = {**self.shared(own), "shapes": self.option("shapes", TINY_SHAPES, SHAPES, SHAPES)}
        return [SpeedJob(model=model, seed=0, repeats=2 if tiny else 10, **shared) for model in models]

    def table(self, records: Sequence[RunRecord]) -> str:
        return "\n".join(speed.table(records, self.order))

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        drawn, (axis,) = new_figure(1, width=6.4, height=4.2)
        speed.draw(axis, records, self.order)
        axis.legend(frameon=False, fontsize=8)
        return drawn
