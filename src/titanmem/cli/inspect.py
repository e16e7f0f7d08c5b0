"""`titanmem inspect MODEL FILE -o report.html`: read a text and write a page that shows what each token did to the
memories. `titanmem serve` has the same live."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanmem.cli.model import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("file", help="text to read; - reads standard input")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="page (default: report.html)")
    parser.add_argument("--limit", type=int, default=100_000, help="tokens to read at most (default: 100000)")
    parser.add_argument("--frozen", action="store_true", help="the memories read and do not change")
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.config import require
    from titanmem.data.packages import load_package
    from titanmem.infer import Engine, Trace, traces
    from titanmem.serve.report import report

    out = arguments.out
    require(arguments.limit >= 1, f"--limit must be at least 1, got {arguments.limit}")
    require(out.suffix in (".html", ".htm"), f"-o {out}: the report is a page; give a name that ends in .html")
    require(out.parent.is_dir(), f"-o {out}: there is no folder {out.parent}; make it first")
    text, name = _read(arguments.file)
    tqdm = load_package("tqdm", "the progress bar", "serve").tqdm
    engine = Engine.load(arguments.model, arguments.device)
    ids = engine.words().encode(text)
    require(bool(ids), f"{arguments.file} has no tokens; give a text that is not empty")
    wanted = ids[: arguments.limit]
    parts: list[Trace] = []
    with tqdm(total=len(wanted), unit="token", unit_scale=True, desc="reading", dynamic_ncols=True, leave=False) as bar:
        try:
            for part in traces(engine, engine.start, wanted, not arguments.frozen):
                parts.append(part)
                bar.update(len(part))
        except KeyboardInterrupt:
            if not parts:
                raise
    trace = Trace.join(parts)
    read = f"{len(trace):,} tokens" if len(trace) == len(ids) else f"the first {len(trace):,} of {len(ids):,} tokens"
    how = "with a frozen memory" if arguments.frozen else "learning"
    before = out.exists()
    out.write_text(report(trace, name, f"{engine.name} read {read}, {how}"), encoding="utf-8")
    if not trace.layers:
        print(f"{engine.name} has no memory that learns: the page shows −log p alone", file=sys.stderr)
    print(f"{read} of {name} in {out} ({out.stat().st_size / 1024:,.0f} KiB); open it in a browser")
    if before:
        print(f"{out} was there before and is replaced; -o NAME.html keeps both", file=sys.stderr)
    return 0


def _read(given: str) -> tuple[str, str]:
    """A text and what to call it."""
    if given == "-":
        return sys.stdin.read(), "standard input"
    path = Path(given)
    if path.is_dir():
        raise ValueError(f"{given} is a folder; give one text file")
    if not path.is_file():
        raise ValueError(f"there is no file {given}; give a text file, or - for standard input")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is no UTF-8 text (byte {error.start}: {error.reason}); convert it first") from error
