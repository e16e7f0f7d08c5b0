"""Forecaster: the past of a series → its next `horizon` steps, channel by channel, all channels with the same weights.

    look-back window ── normalise with its own mean and deviation ── patches ── embed ── blocks ── linear head ── undo

`mixer` names what mixes the patches: a block with a memory (lmm, mac, mag, mal) or plain attention (as in PatchTST).
The linear baselines rlinear and dlinear have no patches. A longer past is read window by window, the memory going on
from one to the next, with a forecast at the end of each.

Legend: B series, C channels, R = B · C rows, L look-back, H horizon, K windows, P patches of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, pad, smooth_l1_loss

from titanmem.blocks import BLOCKS, Block, BlockConfig
from titanmem.blocks.base import Context, reset_projections
from titanmem.config import check_counts, check_keys, check_types, require
from titanmem.layers.neural_memory import MemoryConfig
from titanmem.layers.norm import RMSNorm
from titanmem.models.base import Model, ModelConfig
from titanmem.state import ModelState, check_same_config

LINEAR = ("rlinear", "dlinear")
MIXERS = ("mac", "mag", "mal", "lmm", "attention", *LINEAR)
EPS = 1e-5  # of a window's variance: a constant window stays what it is
TREND = 25  # steps of DLinear's moving average


@dataclass(frozen=True)
class SeriesConfig(ModelConfig):
    """A forecaster. Settings from `patch` on are those of the models with patches. `memory` overrides settings of
    `MemoryConfig`."""

    look_back: int = 96
    horizon: int = 96
    mixer: str = "lmm"
    normalise: bool | None = None  # windows by their own mean and deviation; default: all but dlinear
    loss: str = "mae"  # what is trained: mse, mae or huber
    dropout: float = 0.3
    patch: int = 16
    stride: int = 8
    dim: int = 32
    num_layers: int = 2
    num_heads: int = 2
    mlp_width: int | None = None  # default: 2 · dim
    memory: dict[str, Any] = field(default_factory=dict)
    window_len: int | None = None  # patches that MAG and MAL see; default: those of a look-back window
    segment_len: int | None = None  # patches of MAC's segments; default: half a look-back window
    num_persistent: int = 0
    gate: str = "open"  # MAC and MAG: open, normed, sum or product; forecasts were compared with this one alone
    skip: bool = True  # a linear map of the window is added to the forecast
    kind: str = "series"

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "look_back", "horizon", "patch", "stride", "dim", "num_layers", "num_heads")
        require(self.mixer in MIXERS, f"unknown mixer {self.mixer!r}; known: {', '.join(MIXERS)}")
        require(self.loss in ("mse", "mae", "huber"), f"loss is 'mse', 'mae' or 'huber', got {self.loss!r}")
        require(0 <= self.dropout < 1, f"dropout is a share in [0, 1), got {self.dropout}")
        require(isinstance(self.memory, dict), f"memory is a dictionary, got {self.memory!r}")
        if self.normalise is None:
            object.__setattr__(self, "normalise", self.mixer != "dlinear")
        if self.mixer in LINEAR:
            return
        require(
            self.patch <= self.look_back and self.stride <= self.patch,
            f"patches of {self.patch} steps, one every {self.stride}, do not cover a look-back of {self.look_back}; "
            "need stride ≤ patch ≤ look_back",
        )
        for name, value in (
            ("mlp_width", 2 * self.dim), ("window_len", self.patches), ("segment_len", -(-self.patches // 2))
        ):  # fmt: skip
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_counts(self, "mlp_width", "window_len", "segment_len")
        check_keys(self.memory, sorted(set(MemoryConfig.__dataclass_fields__) - {"dim", "output_gate"}), "memory")
        require(
            self.dim % self.num_heads == 0 and (self.dim // self.num_heads) % 2 == 0,
            f"dim={self.dim} must divide into num_heads={self.num_heads} attention heads of even width",
        )
        self.block_config()

    @property
    def patches(self) -> int:
        """Patches of a look-back window: the last begins at most one stride before its end and is filled up with the
        last value."""
        return (self.look_back - self.patch) // self.stride + 2

    @property
    def learns_online(self) -> bool:
        """Whether the model has a memory that goes on from window to window in a state of bounded size."""
        return self.mixer not in (*LINEAR, "attention")

    def memory_config(self) -> MemoryConfig:
        """Settings of every memory in the model: heads as wide as those of attention, a chunk for every window, or for
        every segment of MAC."""
        chunk = self.segment_len if self.mixer == "mac" else self.patches
        mine = {"dim": self.dim, "num_heads": self.num_heads, "expansion": 2, "chunk_len": chunk}
        return MemoryConfig.from_dict({**mine, **self.memory})

    def block_config(self) -> BlockConfig:
        """What a block needs to know."""
        assert self.mlp_width is not None
        assert self.segment_len is not None
        return BlockConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
            memory=self.memory_config(),
            window_len=self.window_len,
            segment_len=self.segment_len,
            num_persistent=self.num_persistent,
            gate=self.gate,
        )

    def change(self, **changes: Any) -> Self:
        """A config with other settings; what followed from the old ones follows from the new ones."""
        follows: Mapping[str, tuple[str, ...]] = {
            "mlp_width": ("dim",),
            "window_len": ("look_back", "patch", "stride"),
            "segment_len": ("look_back", "patch", "stride"),
            "normalise": ("mixer",),
        }
        for name, causes in follows.items():
            if any(changes.get(cause, getattr(self, cause)) != getattr(self, cause) for cause in causes):
                changes.setdefault(name, None)
        if isinstance(changes.get("memory"), dict):
            changes["memory"] = {**self.memory, **changes["memory"]}
        return super().change(**changes)

    def build(self) -> Forecaster:
        """The model with fresh weights."""
        return Forecaster(self)


class Forecaster(Model):
    """Forecasts of one or many series.

    >>> forecast, state = model(x)               # x [B, L, C] → [B, H, C]
    >>> forecast, state = model(newer, state)    # the memory goes on
    >>> loss, state = model(x, y)                # y [B, H, C]: summed over all predictions
    """

    config: SeriesConfig

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        self.core: LinearCore | TrendCore | PatchCore
        if config.mixer in LINEAR:
            self.core = LinearCore(config) if config.mixer == "rlinear" else TrendCore(config)
        else:
            self.core = PatchCore(config)

    @property
    def blocks(self) -> Any:
        """What is recomputed, compiled and sharded one by one."""
        return self.core.blocks if isinstance(self.core, PatchCore) else []

    def forward(
        self, x: Tensor, y: Tensor | None = None, state: ModelState | None = None, *, learn: bool = True
    ) -> tuple[Tensor, ModelState | None]:
        """x [B, L, C] → the next steps [B, H, C] and the state after the window (None without blocks).

        x may hold K windows one after another, [B, K · L, C]: then the forecasts are [B, K, H, C], each made at the end
        of its window. With y, what follows the first window ([B, (K − 1) · L + H, C]), the first result is the summed
        loss instead, in which NaN of y, truth that nobody knows, does not count. `learn=False`: memories read only.
        """
        c = self.config
        self._check(x, y, state)
        windows = x.transpose(1, 2).reshape(-1, x.shape[1] // c.look_back, c.look_back)  # [R, K, L]
        if c.normalise:
            mean = windows.mean(-1, keepdim=True)
            scale = (windows.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
            out, state = self.core((windows - mean) / scale, state, learn)
            out = out * scale + mean
        else:
            out, state = self.core(windows, state, learn)
        out = out.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 2, 3, 1)  # [B, K, H, C]
        if y is not None:
            truth = y.unfold(1, c.horizon, c.look_back).transpose(2, 3)
            return self._loss(out, truth), state
        return (out.squeeze(1) if x.shape[1] == c.look_back else out), state

    def _loss(self, out: Tensor, truth: Tensor) -> Tensor:
        truth = torch.where(truth.isnan(), out.detach(), truth)  # no error, and a gradient of exactly 0
        if self.config.loss == "huber":
            return smooth_l1_loss(out, truth, reduction="sum")
        difference = out - truth
        return difference.square().sum() if self.config.loss == "mse" else difference.abs().sum()

    def _check(self, x: Tensor, y: Tensor | None, state: ModelState | None) -> None:
        c = self.config
        if x.dim() != 3 or x.shape[1] % c.look_back or x.shape[1] == 0 or not x.is_floating_point():
            raise ValueError(
                f"x must be a float tensor [series, {c.look_back} steps (or a multiple), channels], got {x.dtype} "
                f"{list(x.shape)}"
            )
        expected = (x.shape[0], x.shape[1] - c.look_back + c.horizon, x.shape[2])
        if y is not None and y.shape != expected:
            raise ValueError(
                f"y must hold the {expected[1]} steps after the first {c.look_back} of x, {list(expected)}; got "
                f"{list(y.shape)}"
            )
        if state is None:
            return
        require(self.config.mixer not in LINEAR, f"{self.config.mixer} has no state; leave it out")
        check_same_config(self.config.to_dict(), self.config.completed(state.config), "use this state", "state")
        if state.batch != x.shape[0] * x.shape[2]:
            raise ValueError(
                f"the state holds {state.batch} rows, x has {x.shape[0]} series × {x.shape[2]} channels; a state "
                "belongs to the series that it read"
            )


class LinearCore(nn.Module):
    """RLinear: one linear map from the normalised window to the forecast."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.map = nn.Linear(config.look_back, config.horizon)

    def forward(self, windows: Tensor, state: None, learn: bool) -> tuple[Tensor, None]:
        return self.map(windows), None


class TrendCore(nn.Module):
    """DLinear: one linear map of the moving average and one of what it leaves."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.trend = nn.Linear(config.look_back, config.horizon)
        self.rest = nn.Linear(config.look_back, config.horizon)

    def forward(self, windows: Tensor, state: None, learn: bool) -> tuple[Tensor, None]:
        half = TREND // 2
        trend = avg_pool1d(pad(windows, (half, half), mode="replicate"), TREND, stride=1)
        return self.trend(trend) + self.rest(windows - trend), None


class PatchCore(nn.Module):
    """Patches of a window, mixed by blocks, and one linear head over all of them."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.block_config()
        self.embed = nn.Linear(config.patch, config.dim)
        self.position = nn.Parameter(torch.randn(config.patches, config.dim) * 0.02)
        self.blocks = nn.ModuleList(BLOCKS[config.mixer](inner) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.patches * config.dim, config.horizon)
        self.skip = nn.Linear(config.look_back, config.horizon) if config.skip else None
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in language models: unit scale into the blocks, and what ends in the stream shrinks with depth. The head
        starts small beside a skip."""
        reset_projections(self.blocks, self.config.num_layers)
        if self.skip is not None:
            self.head.weight.mul_(0.1)

    def forward(self, windows: Tensor, state: ModelState | None, learn: bool) -> tuple[Tensor, ModelState]:
        """windows [R, K, L] → [R, K, H] and the state after the last."""
        c = self.config
        patches = pad(windows, (0, c.stride), mode="replicate").unfold(-1, c.patch, c.stride)  # [R, K, P, patch]
        x = self.dropout(self.embed(patches) + self.position).flatten(1, 2)
        states, context = [], Context(learn=learn)
        for index, block in enumerate(self.blocks):
            x, after, _ = block(x, None if state is None else state.blocks[index], context)
            states.append(after)
        x = self.norm(x).unflatten(1, (-1, c.patches)).flatten(2)
        out = self.head(self.dropout(x))
        if self.skip is not None:
            out = out + self.skip(windows)
        return out, ModelState(tuple(states), None, c.to_dict())

    def start(self, rows: int) -> ModelState:
        """The state before the first window."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return ModelState(tuple(block.start(rows) for block in blocks), None, self.config.to_dict())
