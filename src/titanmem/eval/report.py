"""Results of several evaluations as one page, HTML or Markdown, beside the published numbers."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.eval.published import PUBLISHED, beside
from titanmem.eval.suites import SUITES, make_suite
from titanmem.train.plots import write_page

Found = dict[str, Any]
PARTS = ("model", "weights", "settings", "machine", "seconds", "results")


def load_results(places: Sequence[Path]) -> list[Found]:
    """The results in files or in folders (and what lies below them), in the order of suites."""
    files = [file for place in places for file in (sorted(place.rglob("*.json")) if place.is_dir() else [place])]
    found = []
    for file in files:
        require(file.is_file(), f"{file} does not exist; give files or folders that titanmem eval wrote")
        try:
            held = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged, or no .json of titanmem eval: {error}") from error
        if isinstance(held, dict) and held.get("suite") in SUITES:
            lacks = [name for name in PARTS if name not in held]
            require(not lacks, f"{file} has no {', '.join(lacks)}; measure it again with titanmem eval")
            found.append(held)
    require(bool(found), f"no results of titanmem eval in {', '.join(map(str, places))}")
    order = list(SUITES)
    return sorted(found, key=lambda r: (order.index(r["suite"]), r["model"]))


def lines_of(found: Found) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of a suite's table."""
    columns: dict[str, str] = SUITES[found["suite"]].columns
    used = {key: title for key, title in columns.items() if any(key in r for r in found["results"])}
    return list(used.values()), [[_shown(r.get(key)) for key in used] for r in found["results"]]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def about(found: Found) -> str:
    """Which model, where, with which settings."""
    place = found["machine"]["device"]
    settings = ", ".join(
        f"{name}={value}" for name, value in found["settings"].items() if value not in ((), [], {}, None)
    )
    return f"{found['model']} (weights {found['weights']}), {found['seconds']:.0f} s on {place}; {settings}"


def markdown(results: Sequence[Found]) -> str:
    """One section per suite and model."""
    parts = ["# Results", ""]
    for suite in dict.fromkeys(r["suite"] for r in results):
        parts += [f"## {suite}", ""]
        for found in (r for r in results if r["suite"] == suite):
            titles, rows = lines_of(found)
            parts += [f"{about(found)}", "", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
            parts += ["| " + " | ".join(row) + " |" for row in rows] + [""]
        if suite in PUBLISHED:
            parts += [*beside(suite), ""]
    return "\n".join(parts)


def page(results: Sequence[Found], out: Path) -> None:
    """The same as HTML, with pictures."""
    parts: list[Any] = []
    for suite in dict.fromkeys(r["suite"] for r in results):
        parts.append(f"<h2>{suite}</h2>")
        for found in (r for r in results if r["suite"] == suite):
            titles, rows = lines_of(found)
            head = "".join(f"<th>{html.escape(t)}</th>" for t in titles)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            parts.append(html.escape(about(found)))
            figure = make_suite(suite, found["settings"]).figure(found["results"])
            parts += [figure] if figure is not None else []
            parts.append(f"<table><tr>{head}</tr>{body}</table>")
        if suite in PUBLISHED:
            title, numbers = PUBLISHED[suite]
            rows_ = "".join(f"<tr><td>{n}</td><td>{v}</td></tr>" for n, v in numbers.items())
            parts.append(f"Published, other models and data ({html.escape(title)}): <table>{rows_}</table>")
    write_page(out, "Results", parts)
