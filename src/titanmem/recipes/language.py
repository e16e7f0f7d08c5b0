"""Language models of equal size on the same text, for the paper's Tables 1 and 5 and its Figures 7 and 8.

tiny    seconds on a CPU
small   8 million parameters on bytes, minutes on one GPU: rows of 2,048, a window and segments of 512;
        with the size 46m twice the steps, for what is worth it
paper   the named sizes on FineWeb-Edu, as in `BLOCK-SIZE-fineweb`
"""

from __future__ import annotations

from dataclasses import replace

from titanmem.config import require
from titanmem.models.sizes import SIZES, TEXT_GATES
from titanmem.recipes import fineweb
from titanmem.recipes.models import ABLATIONS, DEPTHS, TITANS, Frame
from titanmem.train.config import DataConfig, OptimConfig, TrainConfig

COMPARED = (*TITANS, "attention", "window")  # and, where flash-linear-attention is:
COMPARED_FLA = ("fla_gated_deltanet", "fla_deltanet")
ABLATED = ("lmm", *ABLATIONS, "mac", "mag", "mal")  # the rows of Table 5
DEEP = tuple(DEPTHS)
BYTES = 256
TINY = Frame(
    32, 1, 2, 64, window=32, segment=32, num_persistent=4, memory={"expansion": 2, "chunk_len": 16, **TEXT_GATES}
)
SMALL = Frame(
    384, 4, 6, 1024, window=512, segment=512, num_persistent=16,
    memory={"expansion": 2, "chunk_len": 64, **TEXT_GATES}, multiple=8,
)  # fmt: skip
FRAMES = {  # scale → size → what its models share; the first size is the scale's own
    "tiny": {"tiny": TINY},
    "small": {"8m": SMALL, "46m": replace(SMALL, dim=640, num_layers=8, num_heads=10, mlp_width=1792)},
}
SCALES = (*FRAMES, "paper")


def language_sizes(scale: str) -> list[str]:
    """The sizes of a scale; the first is its own."""
    require(scale in SCALES, f"a scale is one of {', '.join(SCALES)}, got {scale!r}")
    return list(FRAMES[scale]) if scale in FRAMES else list(dict.fromkeys(("340m", *SIZES)))


def language_run(model: str, scale: str = "small", size: str | None = None) -> TrainConfig:
    """A run of a model. Rows are cuts of the running text, so that layers that know no documents can take part."""
    sizes = language_sizes(scale)
    size = size or sizes[0]
    require(size in sizes, f"the scale {scale} has the sizes {', '.join(sizes)}, got {size!r}")
    if scale == "paper":
        full, shared = fineweb("lmm", size), Frame.of_size(size)
        return replace(full, model=shared.model(model, full.model.vocab_size), data=replace(full.data, reset=False))
    shared, small = FRAMES[scale][size], scale == "small"
    steps = (500 if size == "8m" else 1000) if small else 30
    return TrainConfig(
        model=shared.model(model, BYTES),
        data=DataConfig(held_out=0.15, length=2048 if small else 64, reset=False),
        optim=OptimConfig(lr=2e-3, warmup=50 if small else 1, final=0.05),
        steps=steps,
        batch_tokens=2**16 if small else 512,
        micro_rows=32 if small else 8,
        log_every=10 if small else 1,
        eval_every=steps,
        eval_rows=4 if small else 2,
        save_every=250 if small else 30,
        sample_tokens=0,
        keep=1,
    )
