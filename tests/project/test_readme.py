"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
DOCS = [README.parent / "docs" / name for name in ("evaluation.md", "dna.md", "forecasting.md", "serving.md")]
BLOCKS = [
    pytest.param(block, id=f"{file.name}-{number}")
    for file in (README, *DOCS)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", file.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "a block", "exec"), {})


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target
