"""What 8-bit snapshots cost: the same text read on from a session's exact state and from the one that 8 bits gave back.

    python benchmarks/session_bits.py MODEL [--out FILE]

MODEL is a trained model of text, for instance the quickstart's MAC after `titanmem export out/quickstart/mac model`. Of
the longest held-out files of Python's library 4,096 tokens are read, stored and restored; then the next 1,024 are read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm

from titanmem.bench.timing import machine
from titanmem.data.sources import is_held_out, open_source
from titanmem.infer import Engine
from titanmem.infer import snapshot as snapshots
from titanmem.infer.past import Past

FILES, BEFORE, AFTER = 8, 4096, 1024


@torch.no_grad()
def read_on(engine: Engine, past: Past, ids: list[int]) -> Tensor:
    """Log-probabilities behind every token of ids, [T, V]."""
    logits, _ = engine.model(torch.tensor([[*past.unread, *ids]]), past.model)
    return logits[0, len(past.unread) :].float().log_softmax(-1)


def held_out_texts(engine: Engine) -> list[list[int]]:
    source = open_source("python")
    texts = [
        document.text for part in source.parts for document in source.documents(part)
        if is_held_out(document.name, document.text, 0.05)
    ]  # fmt: skip
    found = [engine.words().encode(text) for text in sorted(texts, key=len, reverse=True)[: 2 * FILES]]
    return [ids for ids in found if len(ids) > BEFORE + AFTER][:FILES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/session_bits.json"))
    arguments = parser.parse_args()
    records = []
    with Engine.load(arguments.model, "cpu") as engine, tempfile.TemporaryDirectory() as folder:
        for ids in tqdm(held_out_texts(engine), unit="file"):
            session = engine.session()
            session.append(ids[:BEFORE])
            sizes, restored = {}, {}
            for bits in (0, 8):
                path = Path(folder) / f"{bits}.session"
                about = snapshots.write(path, session.past, engine.identity, bits)
                sizes[bits], restored[bits] = path.stat().st_size, snapshots.read(path, engine.identity)[0]
            more = ids[BEFORE : BEFORE + AFTER]
            exact, rounded = (read_on(engine, restored[bits], more) for bits in (0, 8))
            fresh = read_on(engine, engine.start, more)
            target = torch.tensor(more[1:])
            losses = [float(cross_entropy(chance[:-1], target)) for chance in (exact, rounded, fresh)]
            apart = kl_div(rounded, exact, log_target=True, reduction="none").sum(-1)
            records.append(
                {
                    "tokens": BEFORE, "bytes": sizes[0], "bytes_8_bits": sizes[8], "relative_error": about["loss"],
                    "loss": losses[0], "loss_8_bits": losses[1], "loss_fresh": losses[2],
                    "kl_first_64": float(apart[:64].mean()), "kl_all": float(apart.mean()),
                }
            )  # fmt: skip
    mean = {name: sum(record[name] for record in records) / len(records) for name in records[0]}
    result = {
        "machine": machine(),
        "model": arguments.model.name,
        "files": len(records),
        "mean": mean,
        "records": records,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in mean.items():
        print(f"{name:18}{value:>14,.6g}")


if __name__ == "__main__":
    main()
