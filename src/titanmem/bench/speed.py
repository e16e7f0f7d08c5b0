"""Training steps of one model at several shapes, as a job: measured alone on the device, one record each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanmem.bench.job import Job, device
from titanmem.bench.models import bench_train
from titanmem.bench.record import RunRecord, ordered
from titanmem.bench.timing import machine
from titanmem.config import require
from titanmem.models.language import TitansConfig
from titanmem.recipes.language import language_run
from titanmem.train.provenance import provenance

PEERS = {"fla_gated_deltanet": "Gated DeltaNet (fla)", "fla_transformer": "Transformer++ (fla)"}
SCORE = "tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class SpeedJob(Job):
    """Tokens per second of a model's training step at rows × length."""

    table: str = "throughput"  # or depth
    shapes: Sequence[tuple[int, int]]
    repeats: int = 10

    @property
    def experiment(self) -> str:
        return self.table

    @property
    def name(self) -> str:
        return f"{self.variant}-speed"

    @property
    def steps(self) -> int:
        return len(self.shapes)

    def model_config(self) -> TitansConfig | None:
        """What is measured; None for another library's model."""
        if self.model in PEERS:
            return None
        own = {name: value for name, value in self.settings.items() if name.startswith("model.")}
        run = language_run(self.model, self.settings["scale"], self.settings.get("size"))
        return run.change(own).model

    def check(self) -> None:
        self.model_config()

    def held(self) -> RunRecord | None:
        """What is stored."""
        return RunRecord.read(self.file) if super().done() else None

    def missing(self) -> list[tuple[int, int]]:
        """The shapes that are asked for and not stored."""
        held = self.held()
        there = [] if held is None else [(e["level"]["rows"], e["level"]["length"]) for e in held.levels]
        return [shape for shape in self.shapes if tuple(shape) not in there]

    def done(self) -> bool:
        """Whether every shape is stored."""
        return not self.missing()

    def step(self) -> int:
        return len(self.shapes) - len(self.missing())

    def run(self, beside: int) -> RunRecord:
        """Every shape is kept as soon as it is known."""
        config, begin, record, here = self.model_config(), time.perf_counter(), self.held(), machine()
        require(
            record is None or record.machine.get("device") == here["device"],
            f"{self.file} was measured on another device than {here['device']}; give a --label, or another --out",
        )
        models = {} if config is None else {self.model: config}
        peers = [PEERS[self.model]] if config is None else []
        levels, before = ([], 0.0) if record is None else (list(record.levels), record.minutes)
        for found in bench_train(models, self.missing(), device(), self.repeats, peers):
            levels.append(self._level(found))
            record = RunRecord(
                experiment=self.experiment,
                model=self.model,
                seed=self.seed,
                parameters=0 if config is None else config.parameters(),
                steps=len(levels),
                minutes=round(before + (time.perf_counter() - begin) / 60, 2),
                levels=levels,
                score=SCORE,
                label=self.label,
                settings=self.settings,
                beside=beside,
                machine=here,
                commit=provenance()["commit"],
            )
            record.write(self.file)
        if record is None:
            raise ValueError(f"{self.model} does not run here; its library is not installed, or not all of it")
        return record

    def _level(self, entry: dict[str, Any]) -> dict[str, Any]:
        kept = {name: entry[name] for name in ("step_ms", "peak_gib", "mfu", "note") if entry.get(name) is not None}
        return {"level": {"rows": entry["rows"], "length": entry["length"]}, SCORE: entry.get(SCORE), **kept}

    def brief(self, record: RunRecord) -> str:
        return ", ".join(f"{e['level']['length']:,}: {_shown(e[SCORE])}" for e in record.levels) + " tokens/s"


def _shown(speed: float | None) -> str:
    return "–" if speed is None else f"{speed:,.0f}"


def table(records: Sequence[RunRecord], order: Sequence[str]) -> list[str]:
    """Markdown: tokens per second by rows × length."""
    shapes = sorted({(e["level"]["length"], e["level"]["rows"]) for record in records for e in record.levels})
    lines = ["| tokens/s | " + " | ".join(f"{rows} × {length:,}" for length, rows in shapes) + " |"]
    lines.append("|---|" + "---|" * len(shapes))
    for name in ordered((record.variant for record in records), order):
        held = {
            (e["level"]["length"], e["level"]["rows"]): e[SCORE] for r in records if r.variant == name for e in r.levels
        }
        lines.append(f"| {name} | {' | '.join(_shown(held.get(shape)) for shape in shapes)} |")
    return lines


def draw(axis: Any, records: Sequence[RunRecord], order: Sequence[str]) -> None:
    """Tokens per second against the length of a row."""
    for name in ordered((record.variant for record in records), order):
        found = [e for r in records if r.variant == name for e in r.levels if e[SCORE] is not None]
        points = sorted((entry["level"]["length"], entry[SCORE]) for entry in found)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    lengths = sorted({entry["level"]["length"] for record in records for entry in record.levels})
    axis.set_xscale("log")
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.set(xlabel="length of a row", title="training, tokens per second")
    axis.set_ylim(bottom=0)
