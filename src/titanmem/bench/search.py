"""A learning rate for every cell of a table: all rates with the first seed, then the one that validation likes best
with the other seeds. What is tested plays no part in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from titanmem.bench.job import Job
from titanmem.bench.record import RunRecord
from titanmem.config import require

RATE = "optim.lr"  # the setting
C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True)
class Search(Generic[C]):
    """`make` gives the job of a cell, a rate and a seed; `cell` says which cell a record belongs to, and `loss` what
    validation found, the lower the better."""

    make: Callable[[C, float, int], Job]
    cell: Callable[[RunRecord], C]
    loss: Callable[[RunRecord], float]
    cells: Sequence[C]
    rates: Sequence[float]
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        require(bool(self.rates) and bool(self.seeds), "a search needs at least one learning rate and one seed")
        names = [f"{rate:g}" for rate in self.rates]
        require(len(set(names)) == len(names), f"rates have to differ in their first six digits, got {self.rates}")

    def first(self) -> list[Job]:
        """Every cell with every rate."""
        return [self.make(cell, rate, min(self.seeds)) for cell in self.cells for rate in self.rates]

    def others(self) -> list[Job]:
        """Of every cell whose first runs are there the best rate, with the seeds that are left."""
        found = [RunRecord.read(job.file) for job in self.first() if job.file.exists()]
        best = [(self.cell(record), record.settings[RATE]) for record in chosen(found, self.cell, self.loss)]
        return [self.make(*pair, seed) for pair in best for seed in sorted(self.seeds)[1:]]

    def note(self) -> str:
        """The others in words."""
        seeds = sorted(self.seeds)[1:]
        count = len(self.cells) * len(seeds)
        shown = ", ".join(map(str, seeds))
        return f"; then {count} more with the rate that validation likes best (seeds {shown})" if count else ""


def chosen(
    records: Sequence[RunRecord], cell: Callable[[RunRecord], Any], loss: Callable[[RunRecord], float]
) -> list[RunRecord]:
    """Of every cell the runs with the learning rate whose first seed has the lowest loss; equal ones: the lower
    rate."""
    groups: dict[Any, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: (record.seed, record.settings[RATE])):
        groups.setdefault(cell(record), []).append(record)
    kept = []
    for group in groups.values():
        best = min((record for record in group if record.seed == group[0].seed), key=loss)
        kept += [record for record in group if record.settings[RATE] == best.settings[RATE]]
    return kept
