"""`titanmem report RESULTS… --out PAGE`: join evaluations into one page, .html with pictures or .md."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="files or folders of titanmem eval")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="page to write (default: report.html)")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.config import require
    from titanmem.eval.report import load_results, markdown, page

    require(arguments.out.suffix in (".html", ".md"), f"--out must end in .html or .md, got {arguments.out}")
    results = load_results(arguments.results)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.suffix == ".md":
        arguments.out.write_text(markdown(results))
    else:
        page(results, arguments.out)
    print(f"{len(results)} results in {arguments.out}")
    return 0
