"""Attention over a window and its prefix on a GPU: is every form right, how long does each take.

    python benchmarks/attention.py                # 8 × 4096 and 1 × 32,768, a window of 2,048, 128 prefix tokens

Forms are compared with float64 on short rows first, beside plain torch; one that is more than twice as far off is not
timed. All are timed as CUDA graphs. `cudnn` is the form `flash` where cuDNN's kernels run, `flash` where they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from titanmem.bench.timing import interleaved, machine
from titanmem.ops import backend
from titanmem.ops.attention import Prefix, attend_along, flash, window_attention

FILE = Path(__file__).parent / "results" / "attention_gpu.json"
DEVICE = torch.device("cuda")
HEADS, WIDTH, WINDOW, PREFIX, SEGMENT = 16, 64, 2048, 128, 512
FORMS = ("cudnn", "flash", "flex", "sdpa")
# what is computed: rows × length, window, prefix tokens, and groups of keys that a token sees up to itself
CASES = {
    "window and prefix": dict(window=WINDOW, prefix=PREFIX),
    "window": dict(window=WINDOW),
    "causal": dict(),
    "a segment of MAC": dict(prefix=PREFIX, groups=2),
}


@contextmanager
def using(form: str) -> Iterator[None]:
    """Choose a form; `flash` is FlashAttention's kernels alone."""
    alone = patch.object(flash, "with_cudnn", lambda q: False) if form == "flash" else nullcontext()
    with alone, backend.backend(attention="flash" if form == "cudnn" else form):
        yield


class Problem:
    """Queries, keys, values and a prefix, and the upstream gradient."""

    def __init__(self, rows: int, length: int, window: int | None = None, prefix: int = 0, groups: int = 1) -> None:
        self.window, self.groups = window, groups
        drawn = torch.Generator(DEVICE).manual_seed(0)
        shape = (rows, length, HEADS, WIDTH)
        self.inputs = [torch.randn(shape, generator=drawn, device=DEVICE) for _ in range(2 + 2 * groups)]
        self.known = [torch.randn(1, prefix, HEADS, WIDTH, generator=drawn, device=DEVICE) for _ in range(2)]
        self.upstream = torch.randn(shape, generator=drawn, device=DEVICE)

    def works(self, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
        """Forward, and forward with backward."""
        held = [x.to(dtype) for x in (*self.inputs, *self.known) if x.numel()]
        upstream = self.upstream.to(dtype)

        def leaves() -> list[Tensor]:
            """New ones for every run, which belong to its stream."""
            return [x.detach().requires_grad_() for x in held]

        def attend(given: list[Tensor]) -> Tensor:
            (q, plain_q, *pairs), known = given[: len(self.inputs)], given[len(self.inputs) :]
            prefix = Prefix(*known) if known else None
            if self.groups == 1:
                return window_attention(q, plain_q, *pairs, window_len=self.window, prefix=prefix)
            return attend_along(q, plain_q, list(zip(pairs[::2], pairs[1::2], strict=True)), prefix)

        def forward() -> Tensor:
            return attend(leaves())

        def both() -> list[Tensor]:
            wanted = leaves()
            y = attend(wanted)
            if len(wanted) == len(self.inputs):
                del wanted[1]  # without a prefix nothing asks plain_q
            return [y.detach(), *torch.autograd.grad(y, wanted, upstream)]

        return forward, both


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((x.double() - exact).norm() / exact.norm()) for x, exact in zip(found, truth, strict=True)]


def off(case: dict[str, int], form: str) -> float:
    """The largest error of a form beside plain torch's, over the output and all gradients."""
    short = Problem(2, 1024, **{**case, **({"window": 256} if "window" in case else {})})
    with backend.backend(attention="reference"):
        truth, plain = (short.works(dtype)[1]() for dtype in (torch.float64, torch.bfloat16))
    with using(form):
        found = short.works(torch.bfloat16)[1]()
    return max(a / b for a, b in zip(errors(found, truth), errors(plain, truth), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is here; on a CPU the forms are compared by `pytest tests/ops/test_attention.py`")
    records: list[dict[str, Any]] = []
    for name, case in CASES.items():
        for form in FORMS:
            if form == "flex" and name in ("causal", "a segment of MAC"):
                continue
            ratio = off(case, form)
            right = ratio <= 2
            print(f"{'ok ' if right else 'BAD'} {name}, {form}: {ratio:.2f}× plain torch's error", flush=True)
            shapes = [(8, SEGMENT)] if "groups" in case else [(8, 4096), (1, 32768)]
            for rows, length in shapes if right and (form != "sdpa" or name != "window") else []:
                forward, both = Problem(rows, length, **case).works(torch.bfloat16)
                with using(form):
                    timed = interleaved({"forward": forward, "both": both}, DEVICE, arguments.repeats, graphs=True)
                record = {"attention": name, "form": form, "rows": rows, "length": length, "error_ratio": ratio}
                records.append(record | {f"{what}_ms": timing.median for what, timing in timed.items()})
                shown = ", ".join(f"{what} {timing.median:.3f} ms" for what, timing in timed.items())
                print(f"    {rows} × {length}: {shown}", flush=True)
    note = f"{HEADS} heads × {WIDTH}, bf16, window {WINDOW}, prefix {PREFIX}; milliseconds as CUDA graphs"
    FILE.write_text(json.dumps({"machine": machine(), "note": note, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
