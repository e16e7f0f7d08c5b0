"""Language models of equal size on the same text, for the paper's Tables 1 and 5 and its Figures 7 and 8.

tiny    seconds on a CPU
small   8 million parameters on bytes, minutes on one GPU: rows of 2,048, a window of 256, segments of 512; with the
        size 46m twice the steps, for what is worth it; with 0.6m minutes on one CPU: rows of 512, a window of 64
paper   the named sizes on FineWeb-Edu, as in `BLOCK-SIZE-fineweb`
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanmem.config import require
from titanmem.models.sizes import SIZES, TEXT_MEMORY
from titanmem.recipes import fineweb
from titanmem.recipes.models import ABLATIONS, DEPTHS, FLA_MODELS, TITANS, TRANSFORMERS, Frame
from titanmem.train.config import DataConfig, OptimConfig, ParallelConfig, TrainConfig

COMPARED = (*TITANS, *TRANSFORMERS)  # and, where flash-linear-attention is:
COMPARED_FLA = ("fla_gated_deltanet", "fla_deltanet")
ABLATED = ("lmm", *ABLATIONS, "mac", "mag", "mal")  # the rows of Table 5
DEEP = tuple(DEPTHS)
BYTES = 256
_STILL = ("attention", "attention_conv", *FLA_MODELS)  # keep every token, or no state: each of their rows begins anew


@dataclass(frozen=True)
class Small:
    """A size of ours: what its models share, and how they are trained."""

    frame: Frame
    steps: int
    length: int  # bytes of a row
    batch_tokens: int
    carry_rows: int  # a memory is carried for so many rows in training: it has to read far beyond one
    rate: float = 2e-3

    def run(self, model: str) -> TrainConfig:
        """The training of a model."""
        carry = model not in _STILL
        return TrainConfig(
            model=self.frame.model(model, BYTES),
            data=DataConfig(
                held_out=0.15, length=self.length, reset=False, carry=carry,
                carry_rows=self.carry_rows if carry else None,
            ),
            optim=OptimConfig(lr=self.rate, warmup=max(1, self.steps // 10), final=0.05),
            parallel=ParallelConfig(repeatable=True),
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            micro_rows=self.batch_tokens // self.length,
            log_every=10 if self.steps > 100 else 1,
            eval_every=self.steps,
            eval_rows=2,
            save_every=max(1, self.steps // 2),
            sample_tokens=0,
            keep=1,
        )  # fmt: skip


TINY = Frame(
    32, 1, 2, 64, window=32, segment=32, num_persistent=4, memory={"expansion": 2, "chunk_len": 16, **TEXT_MEMORY}
)
MIDDLE = Frame(
    384, 4, 6, 1024, window=256, segment=512, num_persistent=16,  # of a segment a token sees half on average
    memory={"expansion": 2, "chunk_len": 64, **TEXT_MEMORY}, multiple=8,
)  # fmt: skip
LARGER = replace(MIDDLE, dim=640, num_layers=8, num_heads=10, mlp_width=1792)
CPU = replace(MIDDLE, dim=128, num_layers=2, num_heads=2, mlp_width=384, window=64, segment=128)
OURS = {  # scale → size; the first is the scale's own
    "tiny": {"tiny": Small(TINY, 30, 64, 512, 4)},
    "small": {
        "8m": Small(MIDDLE, 300, 2048, 2**16, 16),
        "46m": Small(LARGER, 1000, 2048, 2**16, 16),
        "0.6m": Small(CPU, 400, 512, 2**13, 8, rate=3e-3),
    },
}
SCALES = (*OURS, "paper")


def language_sizes(scale: str) -> list[str]:
    """The sizes of a scale; the first is its own."""
    require(scale in SCALES, f"a scale is one of {', '.join(SCALES)}, got {scale!r}")
    return list(OURS[scale]) if scale in OURS else list(dict.fromkeys(("340m", *SIZES)))


def language_run(model: str, scale: str = "small", size: str | None = None) -> TrainConfig:
    """A run of a model. Rows are cuts of the running text, so that layers that know no documents can take part."""
    sizes = language_sizes(scale)
    size = size or sizes[0]
    require(size in sizes, f"the scale {scale} has the sizes {', '.join(sizes)}, got {size!r}")
    if scale in OURS:
        return OURS[scale][size].run(model)
    full, shared = fineweb("lmm", size), Frame.of_size(size)
    return replace(full, model=shared.model(model, full.model.vocab_size), data=replace(full.data, reset=False))
