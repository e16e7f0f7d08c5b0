"""One thread per test process: small tensors gain nothing from more, and processes side by side do. Without a GPU the
kernels run in Triton's interpreter, which has to be chosen before they are imported."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
