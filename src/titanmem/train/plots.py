"""Pictures of runs: loss curves of several runs in one PNG, or one HTML page with the pictures inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanmem.train.config import RunConfig
from titanmem.train.export import read_run
from titanmem.train.metrics import FILE, SAMPLES, read_metrics

Metrics = list[dict[str, Any]]


def load_runs(folders: Sequence[Path]) -> dict[str, Metrics]:
    """The records of every run, by the folder's name (the whole path where names repeat)."""
    names = [folder.resolve().name for folder in folders]
    runs = {}
    for folder, name in zip(folders, names, strict=True):
        if not (folder / FILE).exists():
            raise ValueError(f"{folder} has no {FILE}; expected a folder that titanmem train wrote")
        runs[name if names.count(name) == 1 else str(folder)] = read_metrics(folder / FILE)
    return runs


def loss_figure(runs: dict[str, Metrics], label: str) -> Any:
    """Training and held-out loss against steps, and the last held-out loss by position where a run has it."""
    placed = any("by_position" in line for lines in runs.values() for line in lines)
    figure, axes = new_figure(2 if placed else 1)
    left, right = axes[0], axes[-1]
    for index, (name, lines) in enumerate(runs.items()):
        colour = f"C{index}"
        train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        held = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
        if train:
            left.plot(*zip(*train, strict=True), color=colour, alpha=0.45, linewidth=1, label=f"{name}, training")
        if held:
            left.plot(*zip(*held, strict=True), color=colour, marker="o", markersize=3, label=f"{name}, held out")
        places = [line["by_position"] for line in lines if "by_position" in line]
        if places:
            middle = [(p["from"] + p["to"]) / 2 for p in places[-1]]
            right.plot(middle, [p["loss"] for p in places[-1]], color=colour, marker="o", markersize=3, label=name)
            position_axis(right, places[-1])
    if placed:
        right.set(xlabel="position in the document", title="held-out loss by position, last evaluation")
    left.set(xlabel="step", ylabel=label, title="loss")
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    return figure


def memory_figure(runs: dict[str, Metrics]) -> Any | None:
    """Surprise, gates and weight norm of every layer over training; None if no run has a memory."""
    names = {"surprise": "surprise", "weight_norm": "norm of the weights", "step": "step size θ"}
    names |= {"momentum": "momentum η", "forget": "forgetting α"}
    found = {name: [line for line in lines if line.get("memory")] for name, lines in runs.items()}
    if not any(found.values()):
        return None
    figure, axes = new_figure(3, rows=2)
    for index, (run, lines) in enumerate(found.items()):
        layers = list(lines[0]["memory"]) if lines else []
        for depth, layer in enumerate(layers):
            shade = 1 - 0.75 * depth / max(1, len(layers))
            steps = [line["step"] for line in lines]
            for axis, name in zip(axes, names, strict=False):
                values = [line["memory"][layer][name] for line in lines]
                axis.plot(steps, values, color=f"C{index}", alpha=shade, marker=".", markersize=3)
            axes[-1].plot([], [], color=f"C{index}", alpha=shade, label=f"{run}, {layer}")
    for axis, title in zip(axes, names.values(), strict=False):
        axis.set(title=title, xlabel="training step")
    axes[-1].set_axis_off()
    axes[-1].legend(frameon=False, fontsize=8, loc="upper left", ncols=1 + len(axes[-1].lines) // 13)
    return figure


def position_axis(axis: Any, places: Sequence[dict[str, Any]]) -> None:
    """A logarithmic axis with plain numbers where the buckets end."""
    ends = [p["to"] for p in places]
    axis.set_xscale("log")
    axis.set_xticks(ends, [f"{end:,}" for end in ends], rotation=45 if len(ends) > 6 else 0)
    axis.minorticks_off()


def can_draw() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.4) -> tuple[Any, Any]:
    """A figure with its axes, row by row, without needing a screen."""
    figure = _blank(width * columns, height * rows)
    return figure, _axes(figure, rows, columns)


def split_figure(columns: int, more: int, across: int, width: float, height: float) -> tuple[Any, Any, Any]:
    """A figure with a row of axes, and below it `more` smaller ones, `across` side by side."""
    rows = -(-more // across)
    if not more:
        return (*new_figure(columns, width=width, height=height), [])
    heights = [height, 0.55 * height * rows]
    figure = _blank(width * columns, sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    upper, lower = _axes(above, 1, columns), _axes(below, rows, across)
    for axis in lower[more:]:
        axis.remove()
    return figure, upper, lower[:more]


def _blank(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib; pip install 'titanmem[train]'") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def _axes(figure: Any, rows: int, columns: int) -> Any:
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return axes


def draw_map(axis: Any, grid: Sequence[Sequence[float]], lengths: Sequence[int], depths: Sequence[float]) -> Any:
    """Shares by depth (rows) and length (columns) of a needle, in colours and per cent."""
    axis.grid(False)
    shown = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 4 else 0)
    axis.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths])
    return shown


def write_page(path: Path, title: str, parts: Sequence[Any]) -> None:
    """One HTML file: strings are paragraphs (or ready markup if they start with '<'), figures become pictures in it."""
    body = []
    for part in parts:
        if isinstance(part, str):
            body.append(part if part.startswith("<") else f"<p>{html.escape(part)}</p>")
        else:
            body.append(f'<img alt="plot" src="data:image/png;base64,{_encode(part)}">')
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "img{max-width:100%}table{border-collapse:collapse}td,th{padding:.25rem .8rem;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
        "pre{background:#f6f6f6;padding:1rem;overflow-x:auto}"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}<style>{style}</style><h1>{html.escape(title)}</h1>{''.join(body)}</html>\n")


def run_table(configs: Sequence[RunConfig], runs: dict[str, Metrics]) -> str:
    """Size, amount of data, losses and speed of every run."""
    lines = ["<tr><th>run</th><th>parameters</th><th>steps</th><th>read</th><th>held-out loss</th><th>best</th>"]
    lines.append("<th>speed</th></tr>")
    for config, (name, records) in zip(configs, runs.items(), strict=True):
        held = [line["held_out"] for line in records if "held_out" in line]
        speed = f"{config.unit}_per_s"
        speeds = sorted(line[speed] for line in records if speed in line)
        step = max((line["step"] for line in records), default=0)
        cells = [html.escape(name), f"{config.model.parameters():,}", f"{step:,} of {config.steps:,}"]
        cells.append(f"{step * config.amount:,} {config.unit}")
        cells += [f"{held[-1]:.4f}", f"{min(held):.4f}"] if held else ["–", "–"]
        cells.append(f"{speeds[len(speeds) // 2]:,.0f} {config.unit}/s" if speeds else "–")
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _encode(figure: Any) -> str:
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return base64.b64encode(held.getvalue()).decode()


def plot_runs(folders: Sequence[Path], out: Path) -> None:
    """Draw runs into a .png, or a .html page that also has the memory's numbers and the last sample."""
    folders = list(dict.fromkeys(folders))
    runs = load_runs(folders)
    configs = [read_run(folder) for folder in folders]
    losses = loss_figure(runs, " / ".join(dict.fromkeys(config.loss for config in configs)))
    if out.suffix == ".png":
        out.parent.mkdir(parents=True, exist_ok=True)
        losses.savefig(out)
        return
    if out.suffix != ".html":
        raise ValueError(f"--out must end in .png or .html, got {out}")
    parts: list[Any] = [losses, run_table(configs, runs)]
    memory = memory_figure(runs)
    if memory is not None:
        parts += ["<h2>What the memory does</h2>", memory]
    for folder in folders:
        samples = read_metrics(folder / SAMPLES) if (folder / SAMPLES).exists() else []
        if samples:
            last = samples[-1]
            parts.append(f"<h2>{html.escape(folder.name)}, a sample at step {last['step']}</h2>")
            parts.append(f"<pre><b>{html.escape(last['prompt'])}</b>{html.escape(last['text'])}</pre>")
    write_page(out, "Training runs: " + ", ".join(runs), parts)
