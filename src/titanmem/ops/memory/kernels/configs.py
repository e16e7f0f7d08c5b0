"""Warps and pipeline stages of every kernel, fixed so that no user's first step waits for a search. `python
benchmarks/kernels.py tune` measures others on a GPU with `using`: on an H200, with heads of 128 and 256 hidden units,
these are the fastest of four but for the queries' backward kernels, which two stages make 15 and 3 % faster; those have
one, which fits into shared memory for every shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT: dict[str, tuple[int, int]] = {  # (num_warps, num_stages)
    "write_chunks": (8, 1),
    "read_chunks": (4, 2),
    "read_chunks_queries_backward": (8, 1),
    "read_chunks_keys_backward": (8, 1),
    "write_chunks_backward": (8, 1),
}

_tried: dict[str, tuple[int, int]] = {}


def options(kernel: str, width: int = 64) -> dict[str, int]:
    """Launch options of a kernel; two stages of heads wider than 64 do not fit into shared memory."""
    warps, stages = _tried.get(kernel, DEFAULT[kernel])
    if width > 64:
        stages = 1
    return {"num_warps": warps, "num_stages": stages}


@contextmanager
def using(**tried: tuple[int, int]) -> Iterator[None]:
    """Other options within a block: `with using(read_chunks=(8, 2)): ...`."""
    before = dict(_tried)
    _tried.update(tried)
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)
