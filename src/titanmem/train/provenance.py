"""Where a run came from: enough to know later what produced a number."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import titanmem


def provenance() -> dict[str, Any]:
    """Version, commit, machine, libraries and command of this process."""
    about: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "titanmem": titanmem.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }
    if torch.cuda.is_available():
        about["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        about["cuda"] = torch.version.cuda
    return about


def _commit() -> str | None:
    """The commit of the source tree, with + if it has changes; None for an installed package."""
    folder = Path(titanmem.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
