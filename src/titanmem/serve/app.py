"""The application: routes, limits on bodies, who may ask, health and metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Timer
from types import FrameType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import titanmem
from titanmem.serve import errors, inspector, openai, sessions
from titanmem.serve.errors import Refusal
from titanmem.serve.page import page
from titanmem.serve.service import Service

EXPIRY_EVERY = 60.0  # seconds
HURRY_SECONDS = 10  # for answers that were told to end
READ_AWAY = 2**26  # bytes of a body that is too large: a client that still sends does not see the answer


def make_app(service: Service, expire_seconds: float | None = None) -> FastAPI:
    """The application of a service. Sessions that were not used for `expire_seconds` are deleted."""

    async def expire() -> None:
        while expire_seconds is not None:
            try:
                await asyncio.to_thread(service.live.close_idle, 0, expire_seconds)
                await asyncio.to_thread(service.store.expire, expire_seconds)
            except Exception as error:  # a full disk, for instance: try again later
                print(f"old sessions were not deleted: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(min(EXPIRY_EVERY, max(1.0, expire_seconds)))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.ensure_future(expire())
        yield
        service.draining = True
        sweeper.cancel()
        await asyncio.to_thread(service.live.close)

    app = FastAPI(
        title="titanmem",
        version=titanmem.__version__,
        description="A Titans model whose sessions remember: the OpenAI interface, and sessions.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    errors.install(app)
    openai.install(app, service)
    sessions.install(app, service)
    inspector.install(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """It takes requests."""
        fine = not service.draining
        return JSONResponse({"status": "ready" if fine else "draining"}, 200 if fine else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> PlainTextResponse:
        """For Prometheus."""
        service.owner(request)
        return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return page(app.openapi())

    app.add_middleware(Door, service=service)
    return app


class Door:
    """What every request passes first: its size, its host, its measure. Bodies are read whole up to the limit, but for
    imported files, which their route counts itself."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_host(scope)
            inner = receive if scope["path"] == "/v1/sessions/import" else await self._body(scope, receive)
            await self.app(scope, inner, note)
        except Refusal as refusal:
            await errors.response(refusal)(scope, receive, note)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.service.metrics.count("titanmem_requests_total", path=path, status=str(status))
            self.service.metrics.observe(path, time.perf_counter() - begin)

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        most, blocks, size, more = self.service.limits.body_bytes, list[bytes](), 0, True
        while more and size <= most + READ_AWAY:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            block = message.get("body", b"")
            size += len(block)
            if size <= most:
                blocks.append(block)
            more = message.get("more_body", False)
        if size > most:
            raise Refusal(413, f"the body has more than {most} bytes", "body_too_large")
        whole: Message | None = {"type": "http.request", "body": b"".join(blocks), "more_body": False}

        async def again() -> Message:
            nonlocal whole
            if whole is not None:
                first, whole = whole, None
                return first
            return await receive()

        return again

    def _check_host(self, scope: Scope) -> None:
        """Without keys a page in a browser on this machine must not reach the sessions under another name."""
        if self.service.keys.any():
            return
        headers = {name: value.decode("latin1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        for given, address in ((host, host), (origin, origin.partition("://")[2])):  # "null" is a stranger's page too
            if given and not is_local(address):
                raise Refusal(403, f"without API keys only this machine is served, not {given!r}", "not_local")


def is_local(address: str) -> bool:
    """Whether HOST or HOST:PORT is this machine."""
    host = address.rpartition("]")[0].lstrip("[") if address.startswith("[") else address.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_app(app: Any, service: Service, host: str, port: int, drain_seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then answers that were begun may end, and sessions are saved."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not service.draining:
                service.draining = True
                timer = Timer(drain_seconds, service.hurry)
                timer.daemon = True
                timer.start()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app, host=host, port=port, timeout_graceful_shutdown=int(drain_seconds) + HURRY_SECONDS, log_level="info",
        server_header=False,
    )  # fmt: skip
    Server(config).run()
