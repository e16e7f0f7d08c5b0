"""`titanmem serve MODEL`: the model over HTTP, with sessions that last.

titanmem serve tiny
titanmem keys create tiny laptop && titanmem serve tiny --host 0.0.0.0
"""

from __future__ import annotations

import argparse

from titanmem.cli.model import add_model, add_store, session_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this machine's need a key"
    )
    parser.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    add_store(parser)
    parser.add_argument("--name", help="the model's name in requests (default: the folder's)")
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--batching", choices=["exact", "stacked"], help="default: exact on a CPU, stacked on a GPU")
    parser.add_argument("--kernels", action="store_true", help="with the GPU kernels")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for single tokens")
    parser.add_argument("--snapshot-bits", type=int, choices=[0, 8], default=0, help="8: smaller snapshots, not exact")
    parser.add_argument("--expire-days", type=float, help="delete sessions that were not used for so long")
    parser.add_argument("--most-sessions", type=int, default=1000, help="of one key (default: 1000)")
    parser.add_argument("--most-gib", type=float, default=100, help="of one key's sessions on the disk (default: 100)")
    parser.add_argument("--most-requests", type=int, default=64, help="at a time; others get 429 (default: 64)")
    parser.add_argument("--most-prompt", type=int, default=65_536, help="tokens read in one request (default: 65536)")
    parser.add_argument("--most-tokens", type=int, default=4096, help="drawn in one answer (default: 4096)")
    parser.add_argument("--most-body-mib", type=float, default=4, help="size of a request (default: 4)")
    parser.add_argument("--most-open", type=int, default=32, help="idle sessions that stay in memory (default: 32)")
    parser.add_argument(
        "--drain-seconds", type=float, default=30, help="for answers begun before SIGTERM (default: 30)"
    )


def run(arguments: argparse.Namespace) -> int:
    from titanmem.config import require
    from titanmem.data.packages import load_package

    require(0 <= arguments.port < 65_536, f"--port is a number from 0 to 65535, got {arguments.port}")
    for name in ("most_gib", "most_body_mib", "expire_days"):
        value = getattr(arguments, name)
        require(
            value is None or 0 < value < 1e9,
            f"--{name.replace('_', '-')} is more than 0 and less than a billion, got {value}",
        )
    require(0 <= arguments.drain_seconds < 1e6, f"--drain-seconds is not negative, got {arguments.drain_seconds}")
    load_package("fastapi", "titanmem serve", "serve")
    load_package("uvicorn", "titanmem serve", "serve")
    from titanmem.infer import Engine, Quota, Store
    from titanmem.infer.template import ChatTemplate
    from titanmem.serve.app import is_local, make_app, run_app
    from titanmem.serve.keys import Keys
    from titanmem.serve.service import Limits, Service

    engine = Engine.load(
        arguments.model, arguments.device, batching=arguments.batching, kernels=arguments.kernels,
        graphs=False if arguments.no_graphs else None,
        **({} if arguments.name is None else {"name": arguments.name}),
    )  # fmt: skip
    folder = session_folder(arguments)
    quota = Quota(sessions=arguments.most_sessions, bytes=int(arguments.most_gib * 2**30))
    with engine, Store(folder, engine, quota=quota, bits=arguments.snapshot_bits) as store:
        keyed = Keys(store).any()
        local = is_local(f"[{arguments.host}]" if ":" in arguments.host else arguments.host)
        at = "" if arguments.store is None else f" --store {arguments.store}"
        require(
            local or keyed,
            f"--host {arguments.host} lets others in, and there is no API key; make one first: "
            f"titanmem keys create {arguments.model} NAME{at}",
        )
        limits = Limits(
            requests=arguments.most_requests, prompt_tokens=arguments.most_prompt, new_tokens=arguments.most_tokens,
            body_bytes=int(arguments.most_body_mib * 2**20), open_sessions=arguments.most_open,
        )  # fmt: skip
        service = Service(engine, store, ChatTemplate.load(arguments.model, engine.words()), limits, local=local)
        days = arguments.expire_days
        app = make_app(service, None if days is None else days * 86_400)
        print(f"{engine.name} on {engine.device}, {engine.batching} batching, sessions in {folder}", flush=True)
        address = f"http://{arguments.host}:{arguments.port}"
        print(f"{address} shows the memory, {address}/docs all routes", flush=True)
        print("with API keys" if keyed else "without API keys", flush=True)
        run_app(app, service, arguments.host, arguments.port, arguments.drain_seconds)
    return 0
