"""Build a small model, stream a long file of the Python standard library through it, and show what the memory did.

    python examples/quickstart.py [--file PATH] [--tokens N] [--out FOLDER]

The model is not trained: its parameters are random. What you see is the memory alone, learning while it reads: its
inner loss ‖M(k) − v‖² lies below that of a memory that has read the file but is frozen, and far below that of a fresh
one. A second reading gains little: with its initial gates the memory looks back some hundred tokens; training decides
how long it remembers. The state has the same size after 200 tokens as after 200,000.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch

from titanmem import ModelState, TitansConfig, TitansLM
from titanmem.models.cost import parameters

PIECE = 2048


def longest_module() -> Path:
    """The longest source file of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return max(folder.glob("*.py"), key=lambda path: path.stat().st_size)


@torch.no_grad()
def read(
    model: TitansLM, ids: torch.Tensor, state: ModelState | None, learn: bool, label: str
) -> tuple[torch.Tensor, ModelState]:
    """Stream ids through the model in pieces; returns the inner loss of every token, mean over heads and layers."""
    losses, begin = [], time.perf_counter()
    for first in range(0, ids.shape[1], PIECE):
        piece = ids[:, first : first + PIECE]
        _, state, probes = model(piece, state, learn=learn, probe=True)
        losses.append(torch.stack([p.loss.mean(-1) for p in probes if p is not None]).mean(0)[0])
        done = first + piece.shape[1]
        rate = done / (time.perf_counter() - begin)
        bar = "█" * (24 * done // ids.shape[1])
        print(f"\r{label:<28} {bar:<24} {done:>7} tokens  {rate:,.0f} tokens/s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    assert state is not None
    return torch.cat(losses), state


def smooth(loss: torch.Tensor, width: int = 1024) -> torch.Tensor:
    """Means of consecutive tokens."""
    return loss[: len(loss) // width * width].reshape(-1, width).mean(1)


def draw(runs: dict[str, torch.Tensor], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for label, loss in runs.items():
        curve = smooth(loss)
        axes.plot([(i + 0.5) * 1.024 for i in range(len(curve))], curve, label=label, linewidth=1.6)
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("inner loss  ‖M(k) − v‖²")
    axes.set_title(title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=None, help="any file; its bytes are the tokens")
    parser.add_argument("--tokens", type=int, default=40_000, help="read at most so many bytes of it")
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"))
    arguments = parser.parse_args()
    path = arguments.file or longest_module()
    ids = torch.tensor([list(path.read_bytes()[: arguments.tokens])])
    if ids.shape[1] < 4 * PIECE:
        raise SystemExit(f"{path} has {ids.shape[1]} bytes; give a file of at least {4 * PIECE}")

    torch.manual_seed(0)
    config = TitansConfig(vocab_size=256, dim=128, num_layers=2, num_heads=4, block="mag", window_len=128)
    model = TitansLM(config).eval()
    print(f"a MAG model with {parameters(config):,} random parameters reads {ids.shape[1]:,} bytes of {path.name}")
    arguments.out.mkdir(parents=True, exist_ok=True)

    first, state = read(model, ids, None, True, "first reading")
    again, end = read(model, ids, state, True, "second reading")
    frozen, _ = read(model, ids, state, False, "second reading, frozen")
    fresh, _ = read(model, ids, None, False, "fresh memory, not learning")

    state.save(arguments.out / "state.safetensors")
    start = model.start(1)
    print(f"\n{'inner loss, mean over':28}{'first 2k tokens':>17}{'all tokens':>13}")
    runs = {
        "fresh memory, not learning": fresh,
        "first reading": first,
        "second reading": again,
        "second reading, frozen": frozen,
    }
    for label, loss in runs.items():
        print(f"{label:28}{loss[:2048].mean():17.3f}{loss.mean():13.3f}")
    moved = [
        (now - before).norm().item() / before.norm().item()
        for a, b in zip(state.blocks, start.blocks, strict=True)
        for now, before in zip(a.memory.weight, b.memory.weight, strict=True)  # type: ignore[attr-defined]
    ]
    print(f"the weights moved by {min(moved):.0%} to {max(moved):.0%} of their size while it read")
    print(f"the state takes {end.nbytes / 1e6:.1f} MB now and took {state.nbytes / 1e6:.1f} MB one reading ago")
    draw(runs, arguments.out / "memory.png", f"{path.name}: the memory learns while it reads")
    print(f"picture: {arguments.out / 'memory.png'}\nstate:   {arguments.out / 'state.safetensors'}")


if __name__ == "__main__":
    main()
