"""What a benchmark leaves behind: a table, a JSON file, a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanmem.bench.timing import machine
from titanmem.train.plots import new_figure

Record = dict[str, Any]


def table(records: Sequence[Record], columns: dict[str, str]) -> str:
    """Columns by dotted path and title; numbers to three digits."""

    def cell(record: Record, path: str) -> str:
        value: Any = record
        for name in path.split("."):
            value = None if value is None else value.get(name)
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    rows = [list(columns.values()), *([cell(record, path) for path in columns] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def save(records: Sequence[Record], what: str, folder: Path) -> Path:
    """FOLDER/bench_WHAT.json with the machine and the versions; what was measured on another device stays beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    file, here = folder / f"bench_{what}.json", machine()
    if file.exists() and json.loads(file.read_text())["machine"]["device"] != here["device"]:
        file = folder / f"bench_{what}_{re.sub('[^a-z0-9]+', '-', here['device'].lower()).strip('-')}.json"
    file.write_text(json.dumps({"machine": here, "records": list(records)}, indent=1) + "\n")
    return file


def draw(records: Sequence[Record], x: str, lines: dict[str, str], file: Path) -> None:
    """One picture per entry of `lines` (key of the record, title), against `x`, a line for every name."""
    lines = {key: title for key, title in lines.items() if any(record.get(key) is not None for record in records)}
    figure, axes = new_figure(len(lines))
    for axis, (key, title) in zip(axes, lines.items(), strict=True):
        for name in dict.fromkeys(record["name"] for record in records):
            mine = [r for r in records if r["name"] == name and r.get(key) is not None]
            values = [r[key]["median"] if isinstance(r[key], dict) else r[key] for r in mine]
            axis.plot([r[x] for r in mine], values, marker="o", markersize=3, label=name)
        axis.set(xlabel=x, title=title, xscale="log")
        axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(file)
