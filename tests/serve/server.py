"""A server in a thread, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import uvicorn

from small import byte_model
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Engine, Quota, Store
from titanmem.infer.template import ChatTemplate
from titanmem.serve.app import make_app
from titanmem.serve.service import Limits, Service


class Endless(ByteTokenizer):
    """No token ends an answer: it is as long as was asked for, whatever the model says."""

    end = -1


@contextmanager
def serving(
    folder: Path, case: str = "mag", limits: Limits | None = None, batching: str = "exact", quota: Quota | None = None,
    local: bool = True, endless: bool = False,
) -> Iterator[tuple[Service, str]]:  # fmt: skip
    """A service and its address."""
    tokenizer = Endless() if endless else ByteTokenizer()
    with Engine(byte_model(case), tokenizer, name="small", piece=12, batching=batching) as engine:
        store = Store(folder, engine, quota=quota)
        service = Service(engine, store, ChatTemplate(tokenizer), limits, local=local)
        config = uvicorn.Config(make_app(service), port=0, log_level="error", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield service, f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()
            store.close()
