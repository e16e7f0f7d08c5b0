"""What docs/transformers.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_the_page_is_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile("".join(blocks), str(PAGE), "exec"), {})
