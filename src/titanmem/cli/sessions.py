"""`titanmem sessions list | export | import | delete MODEL …`: the sessions of chat and, by key, of the server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from titanmem.cli.model import add_model, add_store, session_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="sessions_verb", required=True, metavar="VERB")
    for name, summary in (
        ("list", "all sessions, the last used first"),
        ("export", "write a session to one file"),
        ("import", "a session from such a file"),
        ("delete", "delete a session"),
    ):
        verb = verbs.add_parser(name, help=summary, description=summary)
        add_model(verb)
        if name != "list":
            verb.add_argument("name", help="the session")
        if name in ("export", "import"):
            verb.add_argument("file", type=Path, metavar="FILE")
        if name == "export":
            verb.add_argument("--bits", type=int, choices=[0, 8], default=0, help="8: a smaller file, not exact")
        verb.add_argument("--owner", default=None if name == "list" else "", help="the key it belongs to, by id")
        add_store(verb)


def run(arguments: argparse.Namespace) -> int:
    from titanmem.config import require
    from titanmem.infer import Engine, Store

    folder = session_folder(arguments)
    require(folder.is_dir(), f"{folder} does not exist; titanmem chat MODEL --session NAME makes the first session")
    needs = arguments.sessions_verb in ("export", "import")
    engine = Engine.load(arguments.model, "cpu") if needs else None
    with Store(folder, engine) as store:
        if arguments.sessions_verb == "list":
            print(f"{'name':24}{'tokens':>12}{'MiB':>9}  {'last used':17}{'forked from':20}owner")
            for info in store.sessions(arguments.owner):
                used = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.used))
                parent = f"{info.parent} at {info.forked_at}" if info.parent else ""
                print(f"{info.name:24}{info.tokens:>12,}{info.bytes / 2**20:>9.2f}  {used:17}{parent:20}{info.owner}")
        elif arguments.sessions_verb == "delete":
            store.delete(arguments.name, arguments.owner)
            print(f"{arguments.name} is deleted")
        elif arguments.sessions_verb == "export":
            with store.open(arguments.name, arguments.owner) as session:
                about = store.export(session, arguments.file, arguments.bits)
                lost = f", relative error {about['loss']:.2%}" if arguments.bits else ""
                print(f"{session.tokens:,} tokens in {arguments.file}, {arguments.file.stat().st_size:,} bytes{lost}")
        else:
            with store.import_file(arguments.file, arguments.name, arguments.owner) as session:
                print(f"{session.name}: {session.tokens:,} tokens")
    return 0
