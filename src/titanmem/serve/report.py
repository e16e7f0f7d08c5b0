"""The inspector as one file: a text that was read, its curves and numbers, without a server and without network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from titanmem.infer.trace import Trace

STATIC = Path(__file__).parent / "static"
MODULES = ("dom.js", "trace.js", "text.js", "curves.js", "reading.js", "report.js")  # each after those it imports


def report(trace: Trace, title: str, about: str) -> str:
    """The page. Its policy lets the script and the style in it run and nothing else, whatever the text holds."""
    style, script = (STATIC / "style.css").read_text(), bundle()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": escape(title),
        "heading": escape(title),
        "about": escape(about),
        "style": style,
        "script": script,
        "trace": inert(trace.to_dict()),
    }
    page = (STATIC / "report.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def bundle() -> str:
    """The modules as one script: what they import stands above them."""
    sources = [(STATIC / name).read_text() for name in MODULES]
    joined = "\n".join(re.sub(r"^import [^;]*;\n", "", source, flags=re.M) for source in sources)
    return "\n" + re.sub(r"^export (?=class|const|function|async)", "", joined, flags=re.M)


def inert(value: Any) -> str:
    """JSON that ends no script element, whatever it holds."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
