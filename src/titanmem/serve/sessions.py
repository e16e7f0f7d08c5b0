"""/v1/sessions: memories by name. Every route sees the sessions of the caller's key and no others."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from titanmem.config import require
from titanmem.infer import Session, SessionInfo, compare, difference
from titanmem.infer.inspect import surprises
from titanmem.serve.errors import Refusal
from titanmem.serve.schemas import Append, Change, Compare, Forget, Fork, Inspect, Mark, NewSession
from titanmem.serve.service import Service

T = TypeVar("T")
Key = Annotated[str | None, Header(min_length=1, max_length=200)]


def install(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
    live, store, limits = service.live, service.store, service.limits

    async def use(request: Request, name: str, function: Callable[[Session], T]) -> T:
        owner = service.owner(request)

        def work() -> T:
            with live.use(name, owner) as session:
                return function(session)

        return await service.run(work)

    def about(session: Session, owner: str, **more: Any) -> dict[str, Any]:
        return {**told(store.info(session.name, owner)), "marks": session.marks, "state_bytes": session.nbytes, **more}

    def tokens_of(given: Append | Inspect | Compare) -> list[int]:
        require((given.text is None) != (given.ids is None), "give text or ids, one of them")
        ids: list[int] = service.engine.session().encode(given.text if given.text is not None else given.ids or [])
        if len(ids) > limits.prompt_tokens:
            raise Refusal(
                413, f"the text has {len(ids)} tokens, at most {limits.prompt_tokens} are taken at once; send parts",
                "too_many_tokens", "text",
            )  # fmt: skip
        return ids

    @router.post("", status_code=201)
    async def create(request: Request, given: NewSession = NewSession()) -> dict[str, Any]:  # noqa: B008
        """A new session, with a first text if one is given."""
        owner = service.owner(request)

        def work() -> dict[str, Any]:
            ids = tokens_of(Append(text=given.text or ""))
            with live.adopt(store.create(given.name, owner, given.policy), owner) as session:
                session.append(ids)
                return about(session, owner)

        return await service.run(work)

    @router.get("")
    async def sessions(request: Request) -> dict[str, Any]:
        """All sessions, the last used first."""
        owner = service.owner(request)
        return {"object": "list", "data": [told(info) for info in store.sessions(owner)]}

    @router.get("/tree")
    async def tree(request: Request) -> dict[str, Any]:
        """All sessions under those they were forked from."""
        infos = store.sessions(service.owner(request))
        nodes = {info.name: {**told(info), "forks": []} for info in sorted(infos, key=lambda info: info.created)}
        roots: list[dict[str, Any]] = []
        for node in nodes.values():
            above = nodes.get(node["parent"] or "")
            (roots if above is None else above["forks"]).append(node)
        return {"object": "tree", "data": roots}

    @router.post("/import", status_code=201)
    async def import_session(request: Request, name: str = "") -> dict[str, Any]:
        """A session from the file that /export gave, as the body of the request."""
        owner = service.owner(request)
        handle, path = tempfile.mkstemp(suffix=".session")
        try:
            size = 0
            with os.fdopen(handle, "wb") as file, service.slot():
                async for block in request.stream():
                    size += len(block)
                    if size > limits.import_bytes:
                        raise Refusal(413, f"the file is larger than {limits.import_bytes} bytes", "body_too_large")
                    await asyncio.to_thread(file.write, block)

            def work() -> dict[str, Any]:
                try:
                    session = store.import_file(path, name, owner)
                except ValueError as error:
                    raise type(error)(str(error).replace(path, "the file")) from error
                with live.adopt(session, owner):
                    return about(session, owner)

            return await service.run(work)
        finally:
            Path(path).unlink(missing_ok=True)

    @router.get("/{name}")
    async def show(name: str, request: Request) -> dict[str, Any]:
        """One session, opened."""
        owner = service.owner(request)
        return await use(request, name, lambda session: about(session, owner))

    @router.patch("/{name}")
    async def change(name: str, given: Change, request: Request) -> dict[str, Any]:
        """Learning or frozen from now on."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            session.set_policy(given.policy)
            return about(session, owner)

        return await use(request, name, work)

    @router.delete("/{name}")
    async def delete(name: str, request: Request) -> dict[str, Any]:
        owner = service.owner(request)
        await service.run(lambda: live.delete(name, owner))
        return {"name": name, "object": "session", "deleted": True}

    @router.post("/{name}/append")
    async def append(name: str, given: Append, request: Request, idempotency_key: Key = None) -> dict[str, Any]:
        """Read a text. When the answer comes, it is on the disk; with the same Idempotency-Key it is not read again."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            count = session.append(tokens_of(given), given.expect, given.policy, idempotency_key)
            more: dict[str, Any] = {}
            if given.surprise:
                more["surprise"] = [seen.to_dict() for seen in session.surprise]
            if given.trace:
                more["trace"] = session.trace.to_dict()
            return about(session, owner, appended=count, **more)

        return await use(request, name, work)

    @router.post("/{name}/fork", status_code=201)
    async def fork(name: str, request: Request, given: Fork = Fork()) -> dict[str, Any]:  # noqa: B008
        """A second session with the same past."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            with live.adopt(store.fork(session, given.name), owner) as other:
                return about(other, owner)

        return await use(request, name, work)

    @router.post("/{name}/save")
    async def save(name: str, request: Request) -> dict[str, Any]:
        """Write a snapshot now."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            session.save()
            return about(session, owner)

        return await use(request, name, work)

    @router.post("/{name}/reset")
    async def reset(name: str, request: Request) -> dict[str, Any]:
        """Forget everything."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            session.reset()
            return about(session, owner)

        return await use(request, name, work)

    @router.post("/{name}/marks", status_code=201)
    async def mark(name: str, request: Request, given: Mark = Mark()) -> dict[str, Any]:  # noqa: B008
        """A place to return to."""
        owner = service.owner(request)
        return await use(request, name, lambda session: about(session, owner, mark=session.mark(given.name)))

    @router.delete("/{name}/marks/{mark:path}")
    async def drop_mark(name: str, mark: str, request: Request) -> dict[str, Any]:
        """Take a mark away; the session stays where it is."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            session.drop_mark(mark)
            return about(session, owner)

        return await use(request, name, work)

    @router.post("/{name}/forget")
    async def forget(name: str, given: Forget, request: Request) -> dict[str, Any]:
        """Return to a mark or a number of tokens, as if nothing after it had been read."""
        owner = service.owner(request)

        def work(session: Session) -> dict[str, Any]:
            session.forget_since(given.since)
            return about(session, owner)

        return await use(request, name, work)

    @router.get("/{name}/surprise")
    async def surprise(name: str, request: Request) -> dict[str, Any]:
        """What the memories made of every token of the last turn: surprise, gates, change of the weights by layer."""
        return await use(request, name, lambda session: {"tokens": [seen.to_dict() for seen in session.surprise]})

    @router.get("/{name}/trace")
    async def trace(name: str, request: Request) -> dict[str, Any]:
        """The same as columns: one list per layer and number."""
        return await use(request, name, lambda session: session.trace.to_dict())

    @router.post("/{name}/inspect")
    async def inspect(name: str, given: Inspect, request: Request) -> dict[str, Any]:
        """The same of a text that the session does not read."""

        def work(session: Session) -> dict[str, Any]:
            seen = surprises(session.engine, session.past, tokens_of(given), given.learn)
            return {"tokens": [token.to_dict() for token in seen]}

        return await use(request, name, work)

    @router.post("/{name}/compare")
    async def compared(name: str, given: Compare, request: Request) -> dict[str, Any]:
        """What comes after a prompt with a fresh, the frozen and the learning memory."""

        def work(session: Session) -> dict[str, Any]:
            return compare(session.engine, session.past, tokens_of(given), given.top)

        return await use(request, name, work)

    @router.get("/{name}/diff/{other}")
    async def diff(name: str, other: str, request: Request) -> dict[str, Any]:
        """How far the memories of two sessions are apart."""
        owner = service.owner(request)

        def work() -> dict[str, Any]:
            with live.use(name, owner) as one, live.use(other, owner) as two:
                return {"layers": difference(one.past.model, two.past.model)}

        return await service.run(work)

    @router.get("/{name}/export", response_class=FileResponse)
    async def export(name: str, request: Request, bits: int = 0) -> FileResponse:
        """The session as one file."""
        handle, path = tempfile.mkstemp(suffix=".session")
        os.close(handle)

        def gone() -> None:
            Path(path).unlink(missing_ok=True)

        try:
            await use(request, name, lambda session: store.export(session, path, bits))
        except BaseException:
            gone()
            raise
        return FileResponse(path, filename=f"{name}.session", background=BackgroundTask(gone))

    app.include_router(router)


def told(info: SessionInfo) -> dict[str, Any]:
    """What a caller learns of a session."""
    held = {key: value for key, value in info.to_dict().items() if key not in ("id", "owner")}
    return {"object": "session", **held}
