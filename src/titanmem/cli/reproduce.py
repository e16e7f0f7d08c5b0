"""`titanmem reproduce EXPERIMENT --scale tiny | small | paper`: an experiment of the paper by one command; stopped and
started again, it goes on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanmem.reproduce import Request

ABOUT = {
    "language": "Table 1: language models of equal size, loss by position far beyond the length of training",
    "depth": "Figures 7 and 8: memories of one to four matrices, loss by position and tokens a second",
    "ablation": "Table 5: the LMM without each of its parts, and with attention",
    "needle": "Table 2: a needle in a haystack",
    "babilong": "Figure 6: BABILong",
    "throughput": "Figure 9: tokens a second against the length of a row",
    "forecasting": "Table 3: forecasts, data sets × horizons",
    "dna": "Table 4: classification of DNA",
}
DATA = {
    "language": "text: a folder, a file, a glob, python (default: python, the source of its library)",
    "needle": "a folder of .txt files, in which the needles n and w are hidden",
    "babilong": "a folder of .txt files, the noise",
    "forecasting": "the folder of ETTh1.csv, …, weather.csv",
    "dna": "the folder of GUE's tasks",
}
TEXT = ("language", "depth", "ablation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name, summary in ABOUT.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.add_argument("settings", nargs="*", help="other settings of the runs as key=value, with a --label")
        verb.add_argument(
            "--scale", default="small", metavar="SCALE",
            help="tiny: seconds on a CPU; small: minutes a run on one GPU (default); paper: as large as the paper's",
        )  # fmt: skip
        if name != "throughput":
            verb.add_argument("--data", help=DATA["language" if name in TEXT else name])
            own = "; a model has its own as in --models lmm:0+1" if name == "forecasting" else ""
            verb.add_argument("--seeds", help=f"with commas{own}")
        verb.add_argument("--models", help="with commas; --dry-run shows the scale's own")
        if name in (*TEXT, "dna"):
            verb.add_argument("--rates", help="learning rates; validation chooses one for every model")
        if name in TEXT:
            verb.add_argument("--test-length", type=int, help="tokens of a test (default: 32768)")
        if name in (*TEXT, "throughput"):
            small = "; at the scale small 8m, 46m, or 0.6m for a CPU" if name in TEXT else ""
            verb.add_argument("--size", help=f"of the models: 170m, 340m, 400m, 760m, 1.3b at the paper's scale{small}")
        if name in ("depth", "throughput"):
            verb.add_argument("--shapes", metavar="ROWSxLENGTH,…", help="whose speed is measured (default: five)")
        for option in _LISTS.get(name, ()):
            verb.add_argument(f"--{option}", help="with commas")
        if name == "babilong":
            verb.add_argument("--facts", help="the folder of bAbI v1.2, for instance tasks_1-20_v1-2/en-10k")
            verb.add_argument("--questions", help="of 1 to 5, with commas (default at the scale small: 1)")
        verb.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once (default: 1)")
        verb.add_argument("--label", default="", help="a name for runs with other settings: lmm+LABEL in the tables")
        verb.add_argument("--out", type=Path, help="folder of JSON (default: benchmarks/results/… for the scale small)")
        verb.add_argument("--runs", type=Path, help="folder of logs and checkpoints (default: out/…)")
        verb.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs too")
        verb.add_argument("--dry-run", action="store_true", help="show what would be run and what it costs, and stop")
        verb.add_argument("--show", action="store_true", help="only the table and the picture of what is stored")


_LISTS = {"needle": ("kinds",), "forecasting": ("datasets", "horizons"), "dna": ("tasks",)}


def run(arguments: argparse.Namespace) -> int:
    from titanmem.bench.script import save_picture
    from titanmem.config import require
    from titanmem.reproduce import open_experiment

    about = ABOUT[arguments.experiment]
    chosen = open_experiment(arguments.experiment, _request(arguments))
    if arguments.dry_run:
        print(f"{arguments.experiment}, scale {chosen.scale}. {about}\n\n{chosen.plan()}")
        return 0
    failed = [] if arguments.show else chosen.run(arguments.parallel)
    records = chosen.records()
    require(bool(records), f"no run is stored in {chosen.out}; the logs are in {chosen.runs}")
    chosen.check_alike()
    note = (
        "\n\nScale tiny: this shows that everything runs, and nothing about the models."
        if chosen.scale == "tiny"
        else ""
    )
    print(f"\n{about}{note}\n\n{chosen.table(records)}")
    save_picture(lambda: chosen.figure(records), chosen.runs / f"{chosen.name}.png")
    return 1 if failed else 0


def _request(arguments: argparse.Namespace) -> Request:
    from titanmem.bench.script import numbers, shapes
    from titanmem.reproduce import Request
    from titanmem.train.config import parse_settings

    def words(name: str) -> list[str] | None:
        given: str | None = getattr(arguments, name, None)
        return given.split(",") if given else None

    def counted(name: str, kind: type) -> list[Any] | None:
        given: str | None = getattr(arguments, name, None)
        return numbers(given, f"--{name}", kind) if given else None

    more: dict[str, Any] = {option: words(option) for option in _LISTS.get(arguments.experiment, ())}
    more |= {name: getattr(arguments, name, None) for name in ("facts", "size", "test_length")}
    more["questions"] = counted("questions", int)
    asked = getattr(arguments, "shapes", None)
    more["shapes"] = shapes(asked, "--shapes") if asked else None
    return Request(
        scale=arguments.scale,
        data=getattr(arguments, "data", None),
        models=words("models"),
        seeds=counted("seeds", int),
        rates=counted("rates", float),
        label=arguments.label,
        settings=parse_settings(arguments.settings),
        out=arguments.out,
        runs=arguments.runs,
        keep=arguments.keep,
        more=more,
    )
