"""One thread per test process: small tensors gain nothing from more, and processes side by side do."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
