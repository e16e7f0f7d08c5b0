"""The main job in about five minutes on two cores: train small models, and see whether the memory does the work.

    python examples/quickstart.py [--out FOLDER] [--minutes N]

1. Recall: a row names pairs of key and value, and asks for them later. A memory model and an attention model of equal
   size, which sees the last 32 tokens, learn it at lengths up to 128 and are tested to 16 times that.
2. Text: a MAC model and an attention model of equal size learn Python source code, reading it as one long stream.
   Held-out files far longer than the window are then read with the memory emptied, frozen and learning.

Everything ends in one page, FOLDER/report.html. Stopped and started again, it goes on with what is left.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanmem import TitansConfig, TitansLM
from titanmem.cli import busy
from titanmem.config import require
from titanmem.data.loader import held_out_rows
from titanmem.data.shards import TokenShards
from titanmem.models.cost import parameters
from titanmem.models.sizes import fit_mlp
from titanmem.recipes.tasks import TINY, TINY_TOKENS, TINY_VOCAB, TINY_WINDOW, tiny_level, tiny_recall
from titanmem.tasks import generator_of
from titanmem.tasks.recall import Recall
from titanmem.train.config import DataConfig, OptimConfig, TrainConfig
from titanmem.train.evaluate import memory_work
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.plots import new_figure, position_axis, write_page

WINDOW = TINY_WINDOW  # what attention sees, in both parts
RECALL = {"memory": "lmm", "attention": "window"}  # recipes MODEL-tiny-recall
TEXT_STEPS = 480
TESTS = [(32, 8), (64, 8), (128, 8), (256, 8), (512, 8), (1024, 8), (2048, 8)]


# -- recall -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: TitansLM, length: int, pairs: int, **how: Any) -> float:
    ids, targets = Recall(TINY_VOCAB).batch(32, tiny_level(length, pairs), generator_of(length))
    asked = targets >= 0
    return (model(ids, **how)[0].argmax(-1)[asked] == targets[asked]).float().mean().item()


def recall_seconds(config: TitansConfig) -> float:
    """One step of a recall model on this machine today."""
    rows = Recall(TINY_VOCAB).batch(TINY_TOKENS // 128, tiny_level(128, 8), generator_of(0))
    model, (ids, targets) = TitansLM(config), rows
    return usual(lambda: model(ids, labels=targets)[0].backward())


def usual(work: Callable[[], object], times: int = 6) -> float:
    """Seconds of the middle of a few tries, the first not counted."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def recall(out: Path, minutes: float) -> dict[str, Any]:
    """Train both models and test them far beyond the length they were trained on."""
    configs = {name: tiny_recall(model).model for name, model in RECALL.items()}
    share = min(1.0, 22 * minutes / (TINY["lmm"] * recall_seconds(configs["memory"])))  # the same share for both
    steps = {name: max(1, int(share * TINY[model])) for name, model in RECALL.items()}
    for name, config in configs.items():
        folder = out / f"recall-{name}"
        chosen = go_on(folder) or tiny_recall(RECALL[name], steps[name])
        steps[name] = chosen.steps
        print(f"recall, {name}: {parameters(config):,} parameters, {chosen.steps} steps", flush=True)
        if not train(chosen, folder)["complete"]:
            raise KeyboardInterrupt
    memory, attention = (load_run(out / f"recall-{name}")[0].eval() for name in ("memory", "attention"))
    return {
        "parameters": {name: parameters(config) for name, config in configs.items()},
        "steps": steps,
        "share": steps["memory"] / TINY["lmm"],
        "tests": TESTS,
        "recall": {
            "memory": [accuracy(memory, *test) for test in TESTS],
            "memory, not allowed to learn": [accuracy(memory, *test, learn=False) for test in TESTS],
            f"attention, window {WINDOW}": [accuracy(attention, *test) for test in TESTS],
        },
    }


def go_on(folder: Path) -> TrainConfig | None:
    """What an earlier start set out to do."""
    file = folder / "config.json"
    return TrainConfig.read(file) if file.exists() else None


# -- text ---------------------------------------------------------------------------------------------------------


def text_configs(data: Path, minutes: float) -> dict[str, TrainConfig]:
    """128 streams of Python source, 64 tokens of each a step, the memory carried on from step to step."""
    mac = TitansConfig(
        512, 64, 1, 2, "mac", mlp_width=128, segment_len=WINDOW, num_persistent=4,
        memory={"chunk_len": WINDOW, "expansion": 1},
    )  # fmt: skip
    attention = TitansConfig(512, 64, 1, 2, "attention", mlp_width=128, attention_window=WINDOW)
    steps = min(TEXT_STEPS, max(40, int(32 * minutes / text_seconds(mac))))
    shared = TrainConfig(
        model=mac,
        data=DataConfig(path=str(data), tokenizer="bpe", vocab_size=512, length=64, carry=True),
        optim=OptimConfig(lr=1e-2, warmup=30, final=0.05),
        steps=steps,
        batch_tokens=8192,
        micro_rows=128,
        eval_every=steps,
        eval_rows=4,
        eval_length=2048,
        save_every=100,
    )
    return {"mac": shared, "attention": replace(shared, model=fit_mlp(attention, parameters(mac), 1))}


def text_seconds(config: TitansConfig) -> float:
    """One step of a text model on this machine today."""
    model, ids = TitansLM(config), torch.randint(0, config.vocab_size, (128, 64))
    state = model(ids)[1].detach()
    return usual(lambda: model(ids, state, documents=torch.zeros_like(ids))[0].square().mean().backward())


def text(out: Path, data: Path, minutes: float) -> dict[str, Any]:
    """Train both models as `titanmem train` does, then read held-out files in four ways."""
    configs = text_configs(data, minutes)
    for name, config in configs.items():
        folder = out / name
        config = go_on(folder) or config
        print(f"text, {name}: {parameters(config.model):,} parameters, {config.tokens:,} tokens", flush=True)
        if not train(config, folder)["complete"]:
            raise KeyboardInterrupt
    rows = held_out_rows(TokenShards(data, "held"), 8192, 4)
    models = {name: load_run(out / name)[0].eval() for name in configs}
    work = {name: memory_work(model, rows, 1024, WINDOW) for name, model in models.items()}
    sample = json.loads((out / "mac" / "samples.jsonl").read_text().splitlines()[-1])
    trained = TrainConfig.read(out / "mac" / "config.json")
    return {
        "share": trained.steps / TEXT_STEPS,
        "parameters": {name: parameters(config.model) for name, config in configs.items()},
        "tokens": trained.tokens,
        "mac": work["mac"],
        "attention": work["attention"],
        "sample": sample,
    }


# -- the report ---------------------------------------------------------------------------------------------------


def recall_figure(found: dict[str, Any]) -> Any:
    figure, (axis,) = new_figure(1, width=7)
    lengths = [length for length, _ in found["tests"]]
    for (name, values), style in zip(found["recall"].items(), ("C0-", "C0:", "C3-"), strict=True):
        axis.plot(lengths, values, style, marker="o", label=name)
    axis.axvspan(lengths[0], 128, color="0.9", zorder=0)
    axis.axhline(2 / TINY_VOCAB, color="0.6", lw=1, label="guessing")
    axis.set(xscale="log", ylim=(0, 1.03), xlabel="length of the row (grey: trained)", ylabel="recall of 8 pairs")
    axis.set_xticks(lengths, [str(x) for x in lengths])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return figure


def text_figure(found: dict[str, Any]) -> Any:
    figure, (left, right) = new_figure(2)
    mac, other = found["mac"], found["attention"]
    names = ["emptied\nevery 32", "frozen", "learning", "attention\nonly"]
    values = [mac["fresh"], mac["frozen"], mac["learning"], other["learning"]]
    for place, (value, colour) in enumerate(zip(values, ("C7", "C9", "C0", "C3"), strict=True)):
        left.plot(place, value, "o", color=colour, ms=9)
        left.annotate(f"{value:.3f}", (place, value), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    left.set_xticks(range(4), names)
    left.set(xlim=(-0.5, 3.5), ylabel="loss, nats per token", title="second half of the files")
    left.margins(y=0.2)
    for work, name, colour in ((mac, "MAC, learning", "C0"), (other, "attention only", "C3")):
        places = [(p["from"] + p["to"]) / 2 for p in work["by_position"]]
        right.plot(places, [p["loss"] for p in work["by_position"]], color=colour, marker="o", ms=3, label=name)
    position_axis(right, mac["by_position"])
    right.set(xlabel="position in the file", title="loss by position")
    right.legend(frameon=False)
    return figure


def report(out: Path, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Write report.html; returns the lines that are printed as well."""
    recalled, steps = first["recall"], first["steps"]
    took = first["seconds"] + second["seconds"]
    header = "".join(f"<th>{length}</th>" for length, _ in first["tests"])
    rows = "".join(f"<tr><td>{n}</td>{''.join(f'<td>{v:.2f}</td>' for v in vs)}</tr>" for n, vs in recalled.items())
    mac, attention = second["mac"], second["attention"]
    four = {
        f"MAC, memory emptied every {WINDOW} tokens": mac["fresh"],
        "MAC, memory of the first half, frozen": mac["frozen"],
        "MAC, memory of the first half, learning on": mac["learning"],
        f"attention only, window {WINDOW}, equal size": attention["learning"],
    }
    cut = ""
    if first["share"] < 1:
        more = math.ceil(first["minutes"] / max(first["share"], 0.1))
        cut = (
            f"This machine was too slow or too busy for all {TINY['lmm']} steps of the recall task: both "
            f"models got {first['share']:.0%} of theirs and may not have learnt it yet. Give it more time "
            f"(make quickstart MINUTES={more}); when nothing else runs, it needs less."
        )
    gain = mac["frozen"] - mac["learning"]
    verdict = f"What the memory holds lowers the loss by {1 - mac['learning'] / mac['fresh']:.1%}; of that, "
    verdict += f"learning on in the second half brings {gain:.3f} nats."
    if attention["learning"] < mac["learning"]:
        verdict += (
            f" Attention alone, of equal size and trained on the same {second['tokens']:,} tokens, still predicts "
            "better: in so small a model its larger MLP counts for more than what lies beyond the window."
        )
    for name, figure in (("recall", recall_figure(first)), ("text", text_figure(second))):
        figure.savefig(out / f"{name}.png")
    write_page(
        out / "report.html",
        "titanmem quickstart",
        [
            f"{took / 60:.1f} minutes on {platform.processor() or platform.machine()}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
            "<h2>1. Recall beyond the window</h2>",
            f"A row names 8 pairs and asks for them later. Memory ({first['parameters']['memory']:,} parameters) and "
            f"attention ({first['parameters']['attention']:,}) were trained at lengths up to 128, for "
            f"{steps['memory']} and {steps['attention']} steps. {cut} The dotted line is the same memory model with "
            "writing switched off: what it still recalls does not come from its memory.",
            recall_figure(first),
            f"<table><tr><th>length</th>{header}</tr>{rows}</table>",
            "<h2>2. Does the memory do the work?</h2>",
            "Loss on the second half of the four longest held-out files of the Python standard library, 8,192 tokens "
            f"each, read as one stream with a window of {WINDOW}.",
            text_figure(second),
            "<table>" + "".join(f"<tr><td>{n}</td><td>{v:.4f}</td></tr>" for n, v in four.items()) + "</table>",
            verdict,
            "<h2>A sample</h2>",
            "Bold: the prompt, from a held-out file. Then what the MAC model writes.",
            f"<pre><b>{html.escape(second['sample']['prompt'])}</b>{html.escape(second['sample']['text'])}</pre>",
        ],
    )
    lines = ["", f"{'recall by length':34}" + "".join(f"{length:>7}" for length, _ in first["tests"])]
    lines += [f"{name:34}" + "".join(f"{v:7.2f}" for v in values) for name, values in recalled.items()]
    if cut:
        lines += ["", cut]
    lines += ["", "loss on held-out text, nats per token"]
    lines += [f"{name:45}{value:.4f}" for name, value in four.items()]
    return [*lines, verdict]


def keep(file: Path, minutes: float, folders: Sequence[Path], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result in `file`, made if it is not there. One that was cut short is made anew where more minutes are given:
    its runs, in `folders`, have ended."""
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if held and held["share"] < 1 and minutes > held["minutes"]:
        file.unlink()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    elif held:
        print(f"{file} is there already; delete the folder {file.parent} to begin anew", flush=True)
        return held
    begin = time.perf_counter()
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {**make(), "minutes": minutes, "seconds": time.perf_counter() - begin}
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"))
    parser.add_argument("--minutes", type=float, default=5, help="about how long to train and test (default: 5)")
    arguments = parser.parse_args()
    out, minutes = arguments.out, arguments.minutes
    require(minutes > 0, f"--minutes is how long it may take, more than 0, got {minutes:g}")
    busy.say()
    runs = [out / f"recall-{name}" for name in RECALL]
    first = keep(out / "recall.json", minutes, runs, lambda: recall(out, minutes))
    runs = [out / "mac", out / "attention"]
    second = keep(out / "text.json", minutes, runs, lambda: text(out, out / "python-bpe512", minutes))
    print("\n".join(report(out, first, second)))
    print(f"\nthe page with the plots: {out / 'report.html'}")
    print(f'next: titanmem export {out / "mac"} out/model && titanmem generate out/model "def "')


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"quickstart: {error}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is left")
