"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("number", range(len(re.findall(r"```python\n", README.read_text()))))
def test_python_blocks_run(number, tmp_path, monkeypatch):
    block = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)[number]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, f"README block {number}", "exec"), {})


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target
