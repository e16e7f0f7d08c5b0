"""A page with all routes, made from the OpenAPI description; it loads nothing from anywhere."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code{background:#f3f3f3;padding:.1em .3em;border-radius:3px}h2{margin-top:2rem}"
    "details{border-top:1px solid #ddd;padding:.4rem 0}summary{cursor:pointer}b{display:inline-block;width:4.5rem}"
    "td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}code{background:#2a2a2a}}"
)


def page(api: dict[str, Any]) -> str:
    """The description as HTML."""
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, about in methods.items():
            shown = _operation(method, path, about, api.get("components", {}).get("schemas", {}))
            groups.setdefault((about.get("tags") or ["server"])[0], []).append(shown)
    parts = [f"<h2>{escape(name)}</h2>{''.join(shown)}" for name, shown in groups.items()]
    title = escape(api["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(api['info']['description'])} Machine-readable: "
        f'<a href="/openapi.json">/openapi.json</a>.</p>{"".join(parts)}</html>'
    )


def _operation(method: str, path: str, about: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = escape(about.get("description") or "")
    body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    rows = [
        f"<tr><td><code>{escape(key)}</code><td>{escape(_kind(value))}<td>{escape(value.get('description', ''))}"
        for key, value in schemas.get(name, {}).get("properties", {}).items()
    ]
    table = f"<table><tr><th>field<th>kind<th>{''.join(rows)}</table>" if rows else ""
    return f"<details><summary><b>{method.upper()}</b><code>{escape(path)}</code> {text}</summary>{table}</details>"


def _kind(value: dict[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(item) for item in value["anyOf"]))
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "const" in value or "enum" in value:
        return " | ".join(repr(item) for item in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items', {}))}"
    return str(value.get("type", "any"))
