"""A folder imports only folders below it; heavy packages have one importing folder; importing is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import titanmem

ROOT = Path(titanmem.__file__).parent
ORDER = [
    "config", "graphs", "state", "data", "tasks", "ops", "layers", "blocks", "models", "infer", "hf", "train",
    "recipes", "bench", "forecast", "eval", "reproduce", "serve", "cli",
]  # fmt: skip
ALONE = {
    "matplotlib": {"train", "forecast"},
    "safetensors": {"state", "data", "models", "hf", "train"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "openai": set(),
    "sqlite3": {"infer"},
    "jinja2": {"infer"},
    "tokenizers": {"data"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "sentencepiece": {"data"},
    "triton": {"ops"},
    "transformers": {"hf"},
    "lm_eval": {"hf"},
}


def imports():
    for path in sorted(ROOT.rglob("*.py")):
        folder = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            yield from ((path, folder, name) for name in names)


def test_folders_import_only_what_is_below_them():
    for path, folder, name in imports():
        parts = name.split(".")
        if parts[0] == "titanmem" and len(parts) > 1 and folder in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(folder), f"{path} imports {name}"


def test_heavy_packages_have_one_home():
    for path, folder, name in imports():
        package = name.split(".")[0]
        assert folder in ALONE.get(package, {folder}), f"{path} imports {name}"


def test_importing_needs_torch_alone():
    code = (
        "import sys; before = set(sys.modules); import torch; torch_brings = set(sys.modules); import titanmem; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - torch_brings} - {'titanmem'} "
        "- set(sys.stdlib_module_names) - {'torch'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
