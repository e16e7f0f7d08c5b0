"""Write golden.json anew: python tests/train/golden.py"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from runs import golden_losses, make_corpus

if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        corpus = make_corpus(Path(name))
        found = {b: golden_losses(corpus, b, Path(name) / b) for b in ("mac", "mag", "mal", "lmm", "attention")}
    lines = ",\n".join(f' "{block}": {json.dumps([round(x, 6) for x in losses])}' for block, losses in found.items())
    (Path(__file__).parent / "golden.json").write_text(f"{{\n{lines}\n}}\n")
