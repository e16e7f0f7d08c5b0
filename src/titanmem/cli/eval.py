"""`titanmem eval MODEL SUITE… SUITE.KEY=VALUE…`: measure a trained model; stopped and started again, it goes on.

titanmem eval out/model recall
titanmem eval out/model needle perplexity needle.lengths=[2048,8192] perplexity.text=corpus/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanmem.cli.model import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "titanmem export or titanmem train")
    parser.add_argument("words", nargs="+", metavar="SUITE", help="suites, and settings as SUITE.KEY=VALUE")
    parser.add_argument("--out", type=Path, help="where results go (default: MODEL/eval, or ~/.titanmem/MODEL/eval)")
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--piece", type=int, default=8192, help="tokens read at once; bounds memory (default: 8192)")
    parser.set_defaults(settings=[])


def run(arguments: argparse.Namespace) -> int:
    from titanmem.eval.subject import Subject
    from titanmem.eval.suite import run_suite
    from titanmem.eval.suites import SUITES, make_suite
    from titanmem.models.base import find_device
    from titanmem.models.shipped import home
    from titanmem.train.config import parse_settings
    from titanmem.train.plots import can_draw

    names = [word for word in arguments.words if "=" not in word]
    settings: dict[str, dict[str, object]] = {name: {} for name in names}
    if not names:
        raise ValueError(f"name a suite: {', '.join(SUITES)}")
    for key, value in parse_settings([w for w in [*arguments.words, *arguments.settings] if "=" in w]).items():
        head, _, name = key.partition(".")
        if head not in settings or not name:
            raise ValueError(f"{key}: settings are given as SUITE.KEY=VALUE for a suite that runs ({', '.join(names)})")
        settings[head][name] = value
    suites = [make_suite(name, settings[name]) for name in names]
    subject = Subject.open(arguments.model, find_device(arguments.device), arguments.piece)
    suites = [suite.fitted(subject) for suite in suites]
    opened = [suite.open(subject) for suite in suites]  # what is wrong is said before hours are spent
    if not can_draw():
        print("there will be no pictures: they need matplotlib (pip install matplotlib)", file=sys.stderr)
    out = arguments.out or home(arguments.model) / "eval"
    for suite, measure in zip(suites, opened, strict=True):
        run_suite(subject, suite, out, measure)
    print(f"results in {out}: " + ", ".join(f"{name}.json" for name in names))
    return 0
