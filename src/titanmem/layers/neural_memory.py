"""NeuralMemory: the long-term memory as a layer.

    x ──► W_Q W_K W_V ──► conv4 ──► silu ──► q, k: l2 norm     v
      └─► gates ────────────────────────────► step, momentum, forget
    memory: write (k, v), read q ──► heads side by side ──► RMSNorm ──► [∘ silu(x W_G)] ──► W_O

It works on any [B, T, dim] input. Legend: B batch, T tokens, H heads, D head width, L matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from titanmem.config import Config, check_counts, check_types, require
from titanmem.layers.contain import LIMIT, contain
from titanmem.layers.gates import TokenGates
from titanmem.layers.norm import RMSNorm
from titanmem.ops import backend
from titanmem.ops.layout import Layout, check_mask, pack, pack_order, unpack
from titanmem.ops.memory import Gates, memory, memory_probe, memory_read
from titanmem.ops.memory.plan import token_positions
from titanmem.ops.streams import conv_streams
from titanmem.state import ConvState, FastWeights, MemoryState, check_same_config


@dataclass(frozen=True)
class MemoryConfig(Config):
    """Settings of a NeuralMemory. docs/differences.md says which are the paper's and which are choices."""

    dim: int
    num_heads: int = 1
    head_dim: int | None = None  # default: dim / num_heads
    depth: int = 2  # weight matrices of the memory; 1 is the linear memory
    expansion: float = 4  # hidden width / head width
    chunk_len: int = 64  # tokens that share one anchor; part of the function, not tuning
    conv_width: int = 4  # 1: no convolution
    norm: bool = True  # LN at the memory's end
    residual: bool = True
    momentum: bool = True
    forget: bool = True
    forget_to: Literal["zero", "start"] = "zero"  # what a memory that forgets all becomes: empty, or as it was at first
    gate_shape: Literal["head", "channel"] = "head"
    gate_span: Literal["token", "chunk"] = "token"
    step_max: float = 0.1
    momentum_max: float = 0.99
    forget_min: float = 1e-5
    step_init: float = 0.01
    momentum_init: float = 0.88
    forget_init: float = 0.0025
    gain_init: float = 0.3
    clip: float = 10.0  # bound of one token's gradient per matrix; 0: none
    output_gate: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "dim", "num_heads", "depth", "chunk_len", "conv_width")
        if self.head_dim is None:
            require(
                self.dim % self.num_heads == 0,
                f"dim={self.dim} does not divide into num_heads={self.num_heads}; change one or give head_dim",
            )
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        check_counts(self, "head_dim")
        require(self.hidden >= 1, f"expansion={self.expansion} leaves no hidden unit at head_dim={self.head_dim}")
        require(self.gate_shape in ("head", "channel"), f"gate_shape is 'head' or 'channel', got {self.gate_shape!r}")
        require(self.forget_to in ("zero", "start"), f"forget_to is 'zero' or 'start', got {self.forget_to!r}")
        require(self.gate_span in ("token", "chunk"), f"gate_span is 'token' or 'chunk', got {self.gate_span!r}")
        require(
            0 < self.step_init < self.step_max, f"need 0 < step_init < step_max, got {self.step_init}, {self.step_max}"
        )
        require(
            0 < self.momentum_init < self.momentum_max < 1,
            f"need 0 < momentum_init < momentum_max < 1, got {self.momentum_init}, {self.momentum_max}",
        )
        require(
            0 < self.forget_min < self.forget_init < 1,
            f"need 0 < forget_min < forget_init < 1, got {self.forget_min}, {self.forget_init}",
        )
        require(self.clip >= 0, f"clip must not be negative (0 switches it off), got {self.clip}")

    @property
    def width(self) -> int:
        """Head width D."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def inner(self) -> int:
        """All heads side by side."""
        return self.num_heads * self.width

    @property
    def hidden(self) -> int:
        """Hidden width of the memory network."""
        return round(self.width * self.expansion)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """I_l × O_l of every weight matrix."""
        widths = [self.width, *[self.hidden] * (self.depth - 1), self.width]
        return list(pairwise(widths))

    @property
    def gate_widths(self) -> list[int]:
        """Gates per head and token, for every matrix."""
        return [1 if self.gate_shape == "head" else out for _, out in self.shapes]

    @staticmethod
    def preset(name: str, dim: int, **settings: Any) -> MemoryConfig:
        """The memory's nearest relatives as settings of the same operation (paper, Appendix C)."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return MemoryConfig.from_dict({"dim": dim, **PRESETS[name], **settings})


_LINEAR: dict[str, Any] = {
    "depth": 1, "norm": False, "residual": False, "momentum": False, "clip": 0.0, "step_max": 0.5, "step_init": 0.25,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "titans": {},
    "titans-text": {"forget_to": "start", "forget_init": 0.01, "step_init": 1e-3, "step_max": 0.01},
    "titans-linear": {"depth": 1},
    "gated-delta": {**_LINEAR, "chunk_len": 1},
    "delta": {**_LINEAR, "chunk_len": 1, "forget": False},
    "ttt-linear": {**_LINEAR, "chunk_len": 16, "forget": False, "step_max": 0.1, "step_init": 0.03},
    "ttt-mlp": {"depth": 2, "momentum": False, "forget": False, "chunk_len": 16},
}


@dataclass(frozen=True)
class Probe:
    """What the memory did with each token. `mask`ed tokens are 0."""

    loss: Tensor  # [B, T, H]     ‖M(k) − v‖² before the write
    surprise: Tensor  # [B, T, H, L]  norm of the gradient
    change: Tensor  # [B, T, H, L]  ‖W_t − W_{t−1}‖
    step: Tensor  # [B, T, H, L]  gates; the mean over channels with gates per channel
    momentum: Tensor
    forget: Tensor

    def map(self, function: Any) -> Probe:
        """A probe with `function` applied to every tensor."""
        return Probe(
            *(function(x) for x in (self.loss, self.surprise, self.change, self.step, self.momentum, self.forget))
        )


class NeuralMemory(nn.Module):
    """A memory whose weights learn while it reads.

    >>> mem = NeuralMemory(dim=64, num_heads=2)
    >>> y, state = mem(x)            # x [B, T, 64]
    >>> y2, state = mem(x2, state)   # goes on, at any cut
    >>> state.save("memory.safetensors")   # MemoryState.load reads it

    Settings are those of `MemoryConfig`.
    """

    def __init__(self, dim: int, num_heads: int = 1, **settings: Any) -> None:
        super().__init__()
        c = self.config = MemoryConfig.from_dict({"dim": dim, "num_heads": num_heads, **settings})
        self.qkv = nn.Linear(c.dim, 3 * c.inner, bias=False)
        self.conv = nn.Parameter(torch.empty(c.conv_width, 3 * c.inner)) if c.conv_width > 1 else None
        self.gates = TokenGates(c)
        self.initial_weight = nn.ParameterList(torch.empty(c.num_heads, i, o) for i, o in c.shapes)
        self.gain = nn.Parameter(torch.empty(c.num_heads, c.width)) if c.norm else None
        self.norm = RMSNorm(c.inner)
        self.gate = nn.Linear(c.dim, c.inner, bias=False) if c.output_gate else None
        self.out = nn.Linear(c.inner, c.dim, bias=False)
        self.reset_parameters()
        self._know_gpu()

    def _apply(self, *given: Any, **how: Any) -> NeuralMemory:
        moved = super()._apply(*given, **how)
        self._know_gpu()
        return moved

    def _know_gpu(self) -> None:
        """torch.compile cannot ask what the GPU is."""
        if self.out.weight.is_cuda:
            backend.look()

    @classmethod
    def from_config(cls, config: MemoryConfig) -> NeuralMemory:
        """Build from a config."""
        return cls(**config.to_dict())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise: unit-scale projections, gates at the config's start, a small random initial memory."""
        c = self.config
        nn.init.normal_(self.qkv.weight, std=c.dim**-0.5)
        nn.init.normal_(self.out.weight, std=c.inner**-0.5)
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=c.dim**-0.5)
        if self.conv is not None:
            bound = c.conv_width**-0.5
            nn.init.uniform_(self.conv, -bound, bound)
        for weight in self.initial_weight:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        if self.gain is not None:
            nn.init.constant_(self.gain, c.gain_init)
        self.gates.reset_parameters()

    # -- public ---------------------------------------------------------------------------------------------------

    @overload
    def forward(
        self, x: Tensor, state: MemoryState | None = ..., *, mask: Tensor | None = ..., learn: bool = ...,
        probe: Literal[False] = ...,
    ) -> tuple[Tensor, MemoryState]: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, state: MemoryState | None = ..., *, mask: Tensor | None = ..., learn: bool = ...,
        probe: Literal[True],
    ) -> tuple[Tensor, MemoryState, Probe]: ...  # fmt: skip
    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        learn: bool = True,
        probe: bool = False,
    ) -> Any:
        """Read x [B, T, dim], writing each token into the memory before reading it back.

        `mask` [B, T] bool: False tokens neither write nor move the state, and their output is 0. `learn=False` reads
        only: weights and surprise stay, the convolution moves on. Returns y [B, T, dim], the new state and, with
        `probe`, a `Probe`. A token that is not finite writes nothing and its output is NaN.
        """
        self._check(x, state)
        order, layout = None, Layout()
        if mask is not None:
            check_mask(mask, x.shape[0], x.shape[1])
            order = pack_order(mask)
            x, layout = pack(x, order), Layout(lengths=mask.sum(1))
        if state is None:
            state = self.start(x.shape[0])
        seen = self.probe(x, state, layout=layout, learn=learn) if probe else None
        y, state = self.run(x, state, layout=layout, learn=learn)
        if order is not None:
            y = unpack(y, order)
            seen = None if seen is None else seen.map(lambda p: unpack(p, order))
        return (y, state, seen) if probe else (y, state)

    def retrieve(self, x: Tensor, state: MemoryState) -> Tensor:
        """Read the memory with x [B, T, dim] as its next tokens; changes nothing. Queries go through the convolution,
        so the first three also see the stream's last inputs."""
        return self(x, state, learn=False)[0]

    def start(self, batch: int, prefix: Tensor | None = None) -> MemoryState:
        """The state before the first token. With `prefix` [P, dim]: after reading these tokens, at a chunk border."""
        c = self.config
        first = self.initial_weight[0]
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        weight = tuple(w.to(dtype).unsqueeze(0).repeat(batch, 1, 1, 1) for w in self.initial_weight)
        if self.base is not None:  # nothing was learnt yet
            weight = tuple(torch.zeros_like(w) for w in weight)
        conv = None
        if self.conv is not None:
            conv = ConvState(first.new_zeros(batch, c.conv_width - 1, 3 * c.inner))
        held = None
        if c.gate_span == "chunk":
            held = weight[0].new_zeros(batch, self.gates.linear.out_features)
        state = MemoryState(FastWeights(weight, tuple(torch.zeros_like(w) for w in weight)), conv, held, c.to_dict())
        if prefix is None or len(prefix) == 0:
            return state
        one = self.start(1)
        # 16, 32, … tokens, fewer than a chunk, are a chunk of their own, which kernels know: nothing stays pending
        count = len(prefix)
        alone = 16 <= count < c.chunk_len and count.bit_count() == 1
        read = contain(prefix.unsqueeze(0))
        _, after = self.scan(*read, one, layout=Layout(), chunk_len=count if alone else None)
        after = MemoryState(after.fast.settle(), after.conv, after.held, after.config)
        return after.fork(batch)

    @property
    def base(self) -> tuple[Tensor, ...] | None:
        """What the network's matrices are besides the state's weights, if it forgets to its start."""
        return tuple(self.initial_weight) if self.config.forget_to == "start" else None

    def read(self, q: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        """M*(q) with q [B, T, H, D] and a state's weights: a read that changes nothing."""
        return memory_read(q, weight, gain=self.gain, residual=self.config.residual, base=self.base)

    # -- the way of a token ---------------------------------------------------------------------------------------

    def run(
        self,
        x: Tensor,
        state: MemoryState,
        *,
        layout: Layout | None = None,
        fresh: MemoryState | None = None,
        learn: bool = True,
    ) -> tuple[Tensor, MemoryState]:
        """`forward` for rows whose real tokens come first; documents start from `fresh` (batch 1)."""
        if x.shape[1] == 0:
            return x, state
        layout = layout or Layout()
        x, finite = contain(x)
        heads, state = self.scan(x, finite, state, layout=layout, fresh=fresh, learn=learn)
        return self.leave(heads, finite, layout, x), state

    def scan(
        self,
        x: Tensor,
        finite: Tensor,
        state: MemoryState,
        *,
        layout: Layout,
        fresh: MemoryState | None = None,
        learn: bool = True,
        chunk_len: int | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """`run` up to what the heads say, [B, T, H, D], and the new state. `x, finite` come from `contain`."""
        q, k, v, gates, conv, held = self._inputs(x, finite, state, layout, fresh)
        c, fast, length = self.config, state.fast, chunk_len or self.config.chunk_len
        if learn:
            y, fast = memory(
                q, k, v, gates, fast, gain=self.gain, chunk_len=length, residual=c.residual, clip=c.clip,
                lengths=layout.lengths, starts=layout.starts, fresh=None if fresh is None else fresh.fast,
                base=self.base,
            )  # fmt: skip
        else:
            y, fast, held = self._read_only(q, fast, layout, fresh, state.held)
        return y, MemoryState(fast, conv, held, state.config)

    def _inputs(
        self, x: Tensor, finite: Tensor, state: MemoryState, layout: Layout, fresh: MemoryState | None
    ) -> tuple[Tensor, Tensor, Tensor, Gates, ConvState | None, Tensor | None]:
        """q, k, v [B, T, H, D], gates, the new convolution state and held gates. `x, finite` come from `contain`."""
        c = self.config
        (q, k, v), conv = conv_streams(
            self.qkv(x), self.conv, state.conv, layout, None if fresh is None else fresh.conv,
            heads=c.num_heads, width=c.width, normed=2, limit=LIMIT,
        )  # fmt: skip
        logits = self.gates(x)
        held = state.held
        if held is not None:
            logits, held = self._hold(logits, held, state.fast, layout)
        gates = self.gates.gates(logits, finite)
        return q, k, v, gates, conv, held

    def _hold(self, logits: Tensor, held: Tensor, fast: FastWeights, layout: Layout) -> tuple[Tensor, Tensor]:
        """Gates per chunk: every token takes the logits of its chunk's first token (a mean would see the future)."""
        position = token_positions(fast.offset, logits.shape[1], layout.starts)
        at = torch.arange(logits.shape[1], device=logits.device)
        first = at - position % self.config.chunk_len
        taken = logits.gather(1, first.clamp(min=0).unsqueeze(-1).expand_as(logits))
        logits = torch.where((first < 0).unsqueeze(-1), held.unsqueeze(1), taken)
        if layout.lengths is None:
            return logits, logits[:, -1]
        last = (layout.lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        return logits, torch.where((layout.lengths > 0).unsqueeze(1), logits.gather(1, last).squeeze(1), held)

    def _read_only(
        self, q: Tensor, fast: FastWeights, layout: Layout, fresh: MemoryState | None, held: Tensor | None
    ) -> tuple[Tensor, FastWeights, Tensor | None]:
        """Read with the weights as they are; a document's start still takes the fresh ones."""
        y = self.read(q, fast.weight)
        since = layout.since_start(q.shape[1])
        if since is None or fresh is None:
            return y, fast, held
        batch = q.shape[0]
        blank = fresh.fast.fork(batch)
        started = since >= 0
        other = self.read(q, blank.weight)
        y = torch.where(started[:, :, None, None], other, y)
        real = layout.real(q.shape[1])
        any_start = (started if real is None else started & real).any(1)
        return y, blank.where(any_start, fast), held

    def leave(self, heads: Tensor, finite: Tensor, layout: Layout, x: Tensor | None = None) -> Tensor:
        """From what the heads say to the output [B, T, dim]; the output gate alone asks for x."""
        y = self.norm(heads.flatten(2))
        if self.gate is not None:
            assert x is not None
            y = y * silu(self.gate(x))
        out = torch.where(finite, self.out(y), float("nan"))
        real = layout.real(heads.shape[1])
        return out if real is None else torch.where(real.unsqueeze(-1), out, 0)

    def probe(
        self,
        x: Tensor,
        state: MemoryState,
        *,
        layout: Layout | None = None,
        fresh: MemoryState | None = None,
        learn: bool = True,
    ) -> Probe:
        """What `run` with the same arguments does to the memory, without gradients."""
        layout = layout or Layout()
        if x.shape[1] == 0:
            shape = (x.shape[0], 0, self.config.num_heads, self.config.depth)
            return Probe(x.new_zeros(shape[:3]), *(x.new_zeros(shape) for _ in range(5)))
        with torch.no_grad():
            q, k, v, gates, *_ = self._inputs(*contain(x), state, layout, fresh)
            c = self.config
            fast = state.fast
            if not learn:  # gates of 0 keep the weights
                still = tuple(torch.zeros_like(g) for g in gates.step)
                gates, fast = Gates(still, still, still), fast.settle()
            seen = memory_probe(
                q, k, v, gates, fast, gain=self.gain, chunk_len=c.chunk_len, residual=c.residual, clip=c.clip,
                lengths=layout.lengths, starts=layout.starts, fresh=None if fresh is None else fresh.fast,
                base=self.base,
            )  # fmt: skip
            means = [torch.stack([g.mean(-1) for g in kind], -1) for kind in (gates.step, gates.momentum, gates.forget)]
            real = layout.real(x.shape[1])
            if real is not None:
                means = [m * real[:, :, None, None] for m in means]
            return Probe(seen.loss, seen.surprise, seen.change, *means)

    def _check(self, x: Tensor, state: MemoryState | None) -> None:
        weight = self.qkv.weight
        if x.dim() != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(
                f"x must be [batch, tokens, {self.config.dim}], got {list(x.shape)}; "
                f"this memory was built with dim={self.config.dim}"
            )
        if x.shape[0] == 0:
            raise ValueError(
                "x has a batch of 0 rows, expected at least 1; drop the call when there is nothing to read"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"x is {x.dtype}, expected {weight.dtype}; embed tokens or convert with x.to({weight.dtype})"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"x is {x.dtype}, the memory's parameters are {weight.dtype}; "
                f"convert with x.to({weight.dtype}) or mem.to(x.dtype)"
            )
        if state is None:
            return
        if not isinstance(state, MemoryState):
            raise ValueError(f"state must be a MemoryState or None, got {type(state).__name__}")
        check_same_config(self.config.to_dict(), self.config.completed(state.config), "use this state", "state")
        if state.batch != x.shape[0]:
            raise ValueError(
                f"the state holds {state.batch} rows, x has {x.shape[0]}; use state.rows(...), state.fork(n) or "
                "MemoryState.stack([...]) to line them up"
            )
