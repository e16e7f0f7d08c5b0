"""A summary token, for MAD's compression task (Poli et al. 2024, arXiv 2403.17844): everything that is asked from it on
is answered from its representation alone.

    x₁ … xₙ Σ · · · ·      stream after the blocks
    y₁ … yₙ d₀ d₁ d₂ d₃    d_j = h + MLP(norm(h + place_j)) with h the stream at Σ

So nothing can be looked up: what the model knows of x₁ … xₙ has to fit into one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanmem.layers.mlp import SwiGLU
from titanmem.layers.norm import RMSNorm
from titanmem.ops.layout import Layout
from titanmem.state import State


@dataclass(frozen=True)
class SummaryState(State):
    """The last summary of every row."""

    vector: Tensor  # [B, dim]
    place: Tensor  # [B] int64: tokens since it, −1 where there was none


class Summary(nn.Module):
    """The decoder behind the summary token `token`."""

    def __init__(self, dim: int, token: int) -> None:
        super().__init__()
        self.dim, self.token = dim, token
        self.norm = RMSNorm(dim)
        self.mlp = SwiGLU(dim, decoder_width(dim))

    def start(self, batch: int) -> SummaryState:
        """No summary yet."""
        scale = self.norm.scale
        place = torch.full((batch,), -1, dtype=torch.int64, device=scale.device)
        return SummaryState(scale.new_zeros(batch, self.dim), place)

    def forward(self, x: Tensor, ids: Tensor, state: SummaryState, layout: Layout) -> tuple[Tensor, SummaryState]:
        """The stream x [B, T, dim] of tokens `ids` with all places from a summary token on decoded from it."""
        at = torch.arange(x.shape[1], device=x.device).expand_as(ids)
        last = torch.where(ids == self.token, at, -1).cummax(1).values  # where the newest summary of this call stands
        cut = torch.full_like(last, -1) if layout.starts is None else _newest(layout.starts, at)
        here = last >= cut.clamp(min=0)  # of this document
        carried = (state.place >= 0).unsqueeze(1) & (last < 0) & (cut < 0)
        index = last.clamp(min=0).unsqueeze(-1).expand_as(x)
        vector = torch.where(here.unsqueeze(-1), x.gather(1, index), state.vector.unsqueeze(1).to(x.dtype))
        place = torch.where(here, at - last, torch.where(carried, state.place.unsqueeze(1) + 1 + at, -1))
        decoded = vector + self.mlp(self.norm(vector + places(place, self.dim).to(x.dtype)))
        y = torch.where((place >= 0).unsqueeze(-1), decoded, x)
        end = at[:, -1] if layout.lengths is None else layout.lengths - 1
        return y, self._after(vector, place, end, state)

    @staticmethod
    def _after(vector: Tensor, place: Tensor, end: Tensor, state: SummaryState) -> SummaryState:
        """The state after token `end` of every row; rows without a token keep theirs."""
        some, column = end >= 0, end.clamp(min=0).unsqueeze(1)
        new = vector.gather(1, column.unsqueeze(-1).expand(-1, -1, vector.shape[-1])).squeeze(1)
        held = torch.where((some & (place.gather(1, column).squeeze(1) >= 0)).unsqueeze(1), new, 0)
        kept = torch.where(some.unsqueeze(1), held, state.vector.to(held.dtype))
        return SummaryState(kept, torch.where(some, place.gather(1, column).squeeze(1), state.place))


def decoder_width(dim: int) -> int:
    """Hidden units of the decoder."""
    return 2 * dim


def places(place: Tensor, dim: int) -> Tensor:
    """Waves of place [B, T] at unit scale, [B, T, dim]."""
    rate = 10_000.0 ** (-torch.arange(dim // 2, device=place.device) / (dim // 2))
    angle = place.clamp(min=0).unsqueeze(-1) * rate
    return 2**0.5 * torch.cat([angle.sin(), angle.cos()], -1)


def _newest(starts: Tensor, at: Tensor) -> Tensor:
    """Where the document of every token begins in this call, −1 before the first."""
    return torch.where(starts, at, -1).cummax(1).values
