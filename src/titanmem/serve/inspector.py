"""The inspector's page: files of this package, under a policy that lets nothing else in."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import FileResponse

from titanmem.serve.errors import Refusal
from titanmem.serve.report import STATIC

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def install(app: FastAPI) -> None:
    """Add the routes. They need no key: the page asks for one."""
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in (".js", ".css")}

    @app.get("/", include_in_schema=False)
    async def inspector() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=HEADERS, media_type=KINDS[".html"])

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> FileResponse:
        if name not in files:
            raise Refusal(404, f"the inspector has no file {name!r}", "unknown_path")
        return FileResponse(files[name], headers=HEADERS, media_type=KINDS[files[name].suffix])
