"""What all routes share: the engine, the sessions, who asks, and how much at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import Request

from titanmem.config import Config, check_counts
from titanmem.infer import Engine, Store
from titanmem.infer.template import ChatTemplate
from titanmem.serve.errors import Refusal
from titanmem.serve.keys import Keys
from titanmem.serve.live import Live
from titanmem.serve.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True)
class Limits(Config):
    """What a server lends. Sessions, bytes and tokens of sessions are the store's `Quota`."""

    requests: int = 64  # at a time
    body_bytes: int = 4 * 2**20
    import_bytes: int = 2**30
    prompt_tokens: int = 65_536  # of one request
    new_tokens: int = 4096  # of one answer
    choices: int = 16  # of one request
    open_sessions: int = 32  # idle ones that stay in memory
    stop_strings: int = 16

    def __post_init__(self) -> None:
        check_counts(self, *self.__dataclass_fields__)


class Service:
    """One model, its sessions and its callers."""

    def __init__(
        self, engine: Engine, store: Store, template: ChatTemplate, limits: Limits | None = None, *, local: bool = True
    ) -> None:
        """`local`: only this machine can connect, so that there need be no keys."""
        self.engine, self.store, self.template, self.local = engine, store, template, local
        self.limits = limits or Limits()
        self.keys = Keys(store)
        self.live = Live(store, self.limits.open_sessions)
        self.metrics = Metrics()
        self.started = int(time.time())
        self.active = 0
        self.draining = self.hurried = False
        self._answers: set[Event] = set()  # to be set where they shall end
        self._limiter = CapacityLimiter(self.limits.requests + 8)
        for name, kind, text in _METRICS:
            self.metrics.describe(f"titanmem_{name}", kind, text)

    def owner(self, request: Request) -> str:
        """Whose sessions a request sees: those of its key, or, while there are no keys, everybody's."""
        given = request.headers.get("authorization", "")
        kind, _, secret = given.partition(" ")
        if not self.keys.any():
            if not self.local:
                raise Refusal(401, "no API key is in force; who runs the server makes one", "invalid_api_key")
            return ""
        found = self.keys.find(secret.strip()) if kind.lower() == "bearer" else None
        if found is None:
            raise Refusal(401, "give a valid API key: Authorization: Bearer KEY", "invalid_api_key")
        return found.id

    def check_model(self, name: str) -> None:
        if name != self.engine.name:
            raise Refusal(
                404, f"there is no model {name!r}; this server has {self.engine.name!r}", "model_not_found", "model"
            )

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the requests that are worked on."""
        if self.draining:
            raise Refusal(503, "the server is shutting down; try again soon", "shutting_down", retry=5)
        if self.active >= self.limits.requests:
            raise Refusal(
                429, f"{self.active} requests are being worked on, no more are taken", "rate_limit_exceeded", retry=1
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def run(self, function: Callable[[], T]) -> T:
        """Work that blocks, in a thread, in a slot of its own."""
        with self.slot():
            try:
                return await to_thread.run_sync(function, limiter=self._limiter)
            except asyncio.CancelledError:
                if not self.draining:
                    raise
                raise self.cut_short from None

    async def relay(self, make: Callable[[Event], Iterator[T]]) -> AsyncIterator[T]:
        """What an iterator yields in a thread. It is told when nobody listens any more, and keeps its slot until it has
        ended."""
        cancelled, loop = Event(), asyncio.get_running_loop()
        items: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()

        def put(item: T | None, error: BaseException | None = None) -> None:
            loop.call_soon_threadsafe(items.put_nowait, (item, error))

        whole = False

        def work() -> None:
            nonlocal whole
            try:
                for item in make(cancelled):
                    put(item)
                whole = not cancelled.is_set()
                put(None)
            except BaseException as error:
                put(None, error)

        with self.slot():
            self._answers.add(cancelled)
            if self.hurried:
                cancelled.set()
            thread = asyncio.ensure_future(to_thread.run_sync(work, limiter=self._limiter))
            try:
                while True:
                    item, error = await items.get()
                    if self.hurried and cancelled.is_set() and not whole and (item is None or error is not None):
                        raise self.cut_short from error
                    if error is not None:
                        raise error
                    if item is None:
                        return
                    yield item
            finally:
                self._answers.discard(cancelled)
                cancelled.set()
                with CancelScope(shield=True):
                    await thread

    @property
    def cut_short(self) -> Refusal:
        """What those hear whose request outlasted the shutdown."""
        says = "the server shut down before the end; what was read or drawn until then stays, so look before a retry"
        return Refusal(503, says, "shutting_down", retry=5)

    def hurry(self) -> None:
        """End the answers that are still being drawn: their time is over. What was drawn belongs to the sessions."""
        self.hurried = True
        for cancelled in list(self._answers):
            cancelled.set()

    def gauges(self) -> dict[str, float]:
        """Values of now."""
        work = self.engine.work
        return {
            "titanmem_requests_active": self.active,
            "titanmem_engine_sessions": work.waiting,
            "titanmem_sessions_open": self.live.count,
            "titanmem_sessions_open_bytes": self.live.nbytes,
            "titanmem_tokens_read_total": work.read,
            "titanmem_tokens_drawn_total": work.drawn,
            "titanmem_forwards_total": work.forwards,
            "titanmem_compute_seconds_total": work.seconds,
        }


_METRICS = [
    ("requests_total", "counter", "requests by path and status"),
    ("requests_active", "gauge", "requests being worked on"),
    ("engine_sessions", "gauge", "sessions with work in the engine"),
    ("sessions_open", "gauge", "sessions held in memory"),
    ("sessions_open_bytes", "gauge", "bytes of their states"),
    ("tokens_read_total", "counter", "tokens of texts read"),
    ("tokens_drawn_total", "counter", "single tokens computed"),
    ("forwards_total", "counter", "calls of the model"),
    ("compute_seconds_total", "counter", "seconds the engine computed"),
]
