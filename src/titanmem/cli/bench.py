"""`titanmem bench ops | train | decode | stream | peers`: how fast it is, beside its peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    about = {
        "ops": "the memory operation in all its forms, beside other libraries' operations",
        "train": "training steps of whole models: tokens/s and memory against length",
        "decode": "time per token and size of the state after long contexts",
        "stream": "a stream read in pieces: speed and memory as it goes on",
        "peers": "which other libraries are measured beside it, and what they compute",
    }
    for name, summary in about.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.add_argument("--device", default=None, help="cpu or cuda (default: cuda if there is one)")
        verb.add_argument("--repeats", type=int, default=10, help="how often each is timed (default: 10)")
        verb.add_argument("--tokens", type=int, default=None, help="most tokens of a row, a context or the stream")
        verb.add_argument("--kernels", action="store_true", help="whole models with the kernels")
        verb.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and pictures")
        if name == "ops":
            verb.add_argument("--hidden", default=None, help="hidden units, with commas (default: 64,128,256; 64,256)")
        if name in _MODELS:
            verb.add_argument(
                "models", nargs="*", metavar="MODEL",
                help="blocks (lmm mac mag mal attention), with the memory's hidden width as in lmm:1 or mac:4",
            )  # fmt: skip
            verb.add_argument(
                "--size", default=None, help="of the models: tiny, 170m, 340m, … (default: 340m, tiny on a CPU)"
            )
            verb.add_argument("--layers", type=int, default=None, help="so many layers instead of the size's own")
        if name == "train":
            verb.add_argument(
                "--shapes", default=None, metavar="ROWSxLENGTH,…", help="for instance 8x4096,1x32768 (default: five)"
            )
            verb.add_argument("--alone", action="store_true", help="without models of other libraries")


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    import titanmem
    from titanmem.bench import peers, report
    from titanmem.config import require
    from titanmem.models.base import find_device

    if arguments.what == "peers":
        there = [peer.name for peer in peers.operations()]
        rows = [{**vars(peer), "runs": "yes" if peer.name in there else "not installed here"} for peer in peers.ALL]
        print(report.table(rows, {"name": "peer", "pinned": "version", "runs": "runs here", "note": "what it is"}))
        return 0
    require(arguments.repeats >= 1, f"--repeats is how often each is timed, 1 or more, got {arguments.repeats}")
    device = find_device(arguments.device)
    forms: dict[str, str] = {"memory": "triton", "streams": "triton"} if arguments.kernels else {}
    with titanmem.backend(**forms):
        records: list[report.Record] = []
        for record in tqdm(_RUN[arguments.what](arguments, device), unit="result", leave=False):
            records.append(record)
            file = report.save(records, arguments.what, arguments.out)  # what was measured stays, whatever comes
    print(report.table(records, _COLUMNS[arguments.what]))
    print(f"\nwritten to {file}", end="")
    if arguments.what in _PICTURES:
        x, lines = _PICTURES[arguments.what]
        report.draw(records, x, lines, file.with_suffix(".png"))
        print(f" and {file.with_suffix('.png')}", end="")
    print()
    return 0


def _ops(arguments: argparse.Namespace, device: Any) -> Iterator[dict[str, Any]]:
    from titanmem.bench.ops import MemoryCase, bench_ops
    from titanmem.bench.script import numbers
    from titanmem.config import require

    asked = None if arguments.hidden is None else numbers(arguments.hidden, "--hidden")
    require(asked is None or min(asked) >= 1, f"--hidden are numbers of units from 1 on, got {arguments.hidden!r}")
    if device.type == "cuda":
        tokens = arguments.tokens or 4096
        cases = [MemoryCase(8, tokens, hidden=hidden) for hidden in asked or (64, 128, 256)]
        cases += [] if asked else [MemoryCase(8, tokens, hidden=256, chunk=128)]
    else:
        cases = [MemoryCase(1, arguments.tokens or 1024, heads=4, hidden=hidden) for hidden in asked or (64, 256)]
    return bench_ops(cases, device, arguments.repeats)


def _configs(arguments: argparse.Namespace, device: Any) -> dict[str, Any]:
    """The models that were asked for, by what the tables call them."""
    from titanmem.blocks import BLOCKS
    from titanmem.config import require
    from titanmem.models.language import TitansConfig

    size = arguments.size or ("340m" if device.type == "cuda" else "tiny")
    found = {}
    for word in arguments.models or _MODELS[arguments.what]:
        block, _, hidden = word.partition(":")
        require(
            block in BLOCKS and (not hidden or hidden.isdigit()),
            f"MODEL is one of {', '.join(BLOCKS)}, with a hidden width as in lmm:1 if need be; got {word!r}",
        )
        changes: dict[str, Any] = {"memory": {"expansion": int(hidden)}} if hidden else {}
        if arguments.layers:
            changes["num_layers"] = arguments.layers
        config = TitansConfig.from_name(f"{block}-{size}", **changes)
        expansion = config.memory_config().expansion
        found[f"{block}-{size}" + ("" if block == "attention" else f", hidden {expansion:g}×")] = config
    return found


def _train(arguments: argparse.Namespace, device: Any) -> Iterator[dict[str, Any]]:
    from titanmem.bench.models import bench_train
    from titanmem.bench.script import shapes

    most = arguments.tokens or (32_768 if device.type == "cuda" else 512)
    total = most if device.type == "cuda" else 1024
    lengths = [length for length in (256, 512, 2048, 4096, 8192, 16_384, 32_768) if length <= most]
    lengths = lengths[-5:] if device.type == "cuda" else lengths
    asked = shapes(arguments.shapes, "--shapes") if arguments.shapes else [(total // n, n) for n in lengths]
    return bench_train(_configs(arguments, device), asked, device, arguments.repeats, not arguments.alone)


def _decode(arguments: argparse.Namespace, device: Any) -> Iterator[dict[str, Any]]:
    from titanmem.bench.models import bench_decode

    most = arguments.tokens or (1_048_576 if device.type == "cuda" else 4096)
    contexts = [context for context in (64, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576) if context <= most]
    return bench_decode(_configs(arguments, device), contexts, device, arguments.repeats)


def _stream(arguments: argparse.Namespace, device: Any) -> Iterator[dict[str, Any]]:
    from titanmem.bench.models import bench_stream

    piece = 4096 if device.type == "cuda" else 2048
    tokens = arguments.tokens or (2_097_152 if device.type == "cuda" else 16_384)
    return bench_stream(_configs(arguments, device), tokens, piece, device)


_MODELS = {
    "train": ("lmm:1", "lmm:4", "mac", "mag", "mal", "attention"),
    "decode": ("lmm", "mac", "mag", "mal"),
    "stream": ("mac",),
}
_RUN = {"ops": _ops, "train": _train, "decode": _decode, "stream": _stream}
_COLUMNS = {
    "ops": {
        "case": "case", "name": "operation", "forward_ms.median": "forward ms", "both_ms.median": "with backward ms",
        "peak_gib": "GiB", "of_floor": "of the floor", "note": "",
    },
    "train": {
        "name": "model", "rows": "rows", "length": "length", "tokens_per_s": "tokens/s", "peak_gib": "GiB",
        "mfu": "MFU", "note": "",
    },
    "decode": {
        "name": "model", "context": "context", "launched_ms.median": "ms a token", "graph_ms.median": "as a graph",
        "state_mib": "state MiB",
    },
    "stream": {"name": "model", "read": "tokens read", "tokens_per_s": "tokens/s", "peak_gib": "GiB"},
}  # fmt: skip
_PICTURES: dict[str, tuple[str, dict[str, str]]] = {
    "train": ("length", {"tokens_per_s": "tokens per second", "peak_gib": "peak memory, GiB"}),
    "decode": (
        "context",
        {"launched_ms": "ms per token, launched", "graph_ms": "ms per token, CUDA graph", "state_mib": "state, MiB"},
    ),
    "stream": ("read", {"tokens_per_s": "tokens per second", "peak_gib": "peak memory, GiB"}),
}
