"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and the status that fits."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from titanmem.infer import Conflict, QuotaExceeded, SessionBusy
from titanmem.infer.session import KeyUsed
from titanmem.infer.store import NameTaken, UnknownSession
from titanmem.infer.tokenlog import NotWritten


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry


STATUS: list[tuple[type[Exception], int, str]] = [
    (UnknownSession, 404, "session_not_found"),
    (SessionBusy, 409, "session_busy"),
    (NameTaken, 409, "session_exists"),
    (KeyUsed, 409, "idempotency_key_used"),
    (Conflict, 409, "session_moved_on"),
    (QuotaExceeded, 429, "insufficient_quota"),
    (ValueError, 400, "invalid_value"),
]


def refusal_of(error: Exception) -> Refusal:
    """What an error means to a client; of those that are ours it learns nothing."""
    if isinstance(error, Refusal):
        return error
    for kind, status, code in STATUS:
        if isinstance(error, kind) and not isinstance(error, NotWritten):
            return Refusal(status, str(error), code)
    traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, (NotWritten, OSError)):
        return Refusal(507, "the server's disk is full or failed; nothing of this was kept", "not_written")
    return Refusal(500, "the server failed; its log says why", "internal_error")


def body(refusal: Refusal) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if refusal.status >= 500 else kinds.get(refusal.status, "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def response(refusal: Refusal) -> JSONResponse:
    headers = {} if refusal.retry is None else {"Retry-After": str(refusal.retry)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body(refusal), refusal.status, headers)


def _no_json(body: str, fault: dict[str, Any]) -> str:
    """Where a body stops being JSON, and what stands there."""
    at = fault["loc"][1]
    line, column = body.count("\n", 0, at) + 1, at - body.rfind("\n", 0, at)
    found = repr(body[at : at + 20]) if at < len(body) else "the end"
    return f"the body is not JSON: {fault['ctx']['error']} in line {line}, column {column}, found {found}"


def _unknown_field(fault: dict[str, Any]) -> Refusal:
    """What `check_fields` found, with its place."""
    place = ".".join(str(part) for part in fault["loc"][1:])
    name = fault["ctx"]["name"]
    says = f"{place}: {fault['msg']}" if place else fault["msg"]
    return Refusal(422, says, "unknown_field", f"{place}.{name}" if place else name)


def install(app: FastAPI) -> None:
    """Answer every error in this form."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return response(refusal_of(error))

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first, *others = error.errors()
        if first["type"] == "json_invalid":
            return response(Refusal(422, _no_json(str(error.body), first), "invalid_json"))
        if first["type"] == "extra_forbidden":
            return response(_unknown_field(first))
        where = first["loc"][1:]
        same = [other for other in others if other["loc"][1:2] == where[:1]]  # what else the field might have been
        place = ".".join(str(part) for part in (where[:1] if same else where))
        says = ", or ".join(dict.fromkeys(one["msg"] for one in (first, *same[:4])))
        kind = request.headers.get("content-type", "")
        if not where and "json" not in kind:
            says = f"send JSON with the header Content-Type: application/json, not {kind!r}"
        return response(Refusal(422, f"{place or 'the body'}: {says}", "invalid_type", place or None))

    async def plain(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {400: "invalid_json", 404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code)
        says = "the body is no JSON in UTF-8" if error.status_code == 400 else error.detail
        return response(Refusal(error.status_code, f"{request.method} {request.url.path}: {says}", code))

    for kind in (Refusal, ValueError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
