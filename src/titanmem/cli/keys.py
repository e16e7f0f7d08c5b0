"""`titanmem keys create | list | revoke MODEL [NAME]`: who may use `titanmem serve`."""

from __future__ import annotations

import argparse
import time

from titanmem.cli.model import add_model, add_store, session_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="keys_verb", required=True, metavar="VERB")
    for name, summary in (
        ("create", "make a key and show it, once"),
        ("list", "all keys"),
        ("revoke", "take a key out of force"),
    ):
        verb = verbs.add_parser(name, help=summary, description=summary)
        add_model(verb)
        if name != "list":
            verb.add_argument("name", help="what the key is for, or its id")
        add_store(verb)


def run(arguments: argparse.Namespace) -> int:
    from titanmem.config import require
    from titanmem.infer import Store
    from titanmem.models.shipped import model_folder
    from titanmem.serve.keys import Keys

    folder = session_folder(arguments)
    served = model_folder(arguments.model) if arguments.store is None else folder.parent
    require(served.is_dir(), f"there is no folder {served}; give the model that is served, or --store")
    with Store(folder) as store:
        keys = Keys(store)
        if arguments.keys_verb == "create":
            key, secret = keys.create(arguments.name)
            print(secret)
            print(f"{key.id} ({key.name}): keep the line above, it is not shown again")
        elif arguments.keys_verb == "revoke":
            key = keys.revoke(arguments.name)
            print(f"{key.id} ({key.name}) is revoked")
        else:
            if not keys.all():
                print(f"no keys; titanmem keys create {arguments.model} NAME makes one")
            for key in keys.all():
                used = "never" if key.used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(key.used))
                state = "in force" if key.revoked is None else "revoked"
                print(f"{key.id}  {state:9} used {used:17} {key.name}")
    return 0
