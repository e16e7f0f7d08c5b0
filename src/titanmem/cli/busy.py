"""Whether other programs keep the cores busy: torch's threads then wait for each other, and a command can take many
times as long as with one thread."""

from __future__ import annotations

import os
import sys


def advice() -> str | None:
    """What to do about it, if they do."""
    import torch

    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores / 2 or torch.get_num_threads() == 1 or torch.cuda.is_available():
        return None
    return (
        f"note: {load:.1f} of {cores} cores were busy in the last minute. Where other programs keep them busy, torch's "
        "threads wait for each other; OMP_NUM_THREADS=1 before a command can make it many times as fast"
    )


def say() -> None:
    """On stderr."""
    found = advice()
    if found is not None:
        print(found, file=sys.stderr, flush=True)
