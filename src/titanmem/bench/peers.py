"""Thin adapters to other libraries, used where they are installed. Each says what it computes and what it does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from titanmem.bench.ops import MemoryCase
    from titanmem.bench.timing import Work


@dataclass(frozen=True)
class Peer:
    """Another library's operation on the same batch, tokens, heads and head width."""

    name: str
    package: str
    pinned: str
    note: str
    build: Callable[[Any, torch.device, torch.dtype], tuple[Work, Work]]
    launched: bool = False  # not tried as a CUDA graph: it has thousands of kernels and tens of GiB


def _pair(run: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> tuple[Work, Work]:
    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    def train() -> None:
        y = run(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return forward, train


def _rows(case: MemoryCase, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (case.batch, case.tokens, case.heads, case.width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    unit = torch.nn.functional.normalize
    return [x.requires_grad_() for x in (unit(q, dim=-1), unit(k, dim=-1), v)]


def _attention(case: MemoryCase, device: torch.device, dtype: torch.dtype) -> tuple[Work, Work]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _pair(run, _rows(case, device, dtype))


def _gated_delta(case: MemoryCase, device: torch.device, dtype: torch.dtype) -> tuple[Work, Work]:
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True  # the library refuses this gradient on Hopper with Triton 3.4–3.7.0: timing only
    shape = (case.batch, case.tokens, case.heads)
    decay = torch.nn.functional.logsigmoid(torch.randn(shape, device=device) + 5).requires_grad_()
    beta = torch.rand(shape, device=device, dtype=dtype).requires_grad_()
    return _pair(lambda *given: chunk_gated_delta_rule(*given)[0], [*_rows(case, device, dtype), decay, beta])


def _delta(case: MemoryCase, device: torch.device, dtype: torch.dtype) -> tuple[Work, Work]:
    from fla.ops.delta_rule import chunk_delta_rule

    beta = torch.rand(case.batch, case.tokens, case.heads, device=device, dtype=dtype).requires_grad_()
    return _pair(lambda q, k, v, b: chunk_delta_rule(q, k, v, b)[0], [*_rows(case, device, dtype), beta])


def _titans_pytorch(case: MemoryCase, device: torch.device, dtype: torch.dtype) -> tuple[Work, Work]:
    from titans_pytorch import MemoryMLP, NeuralMemory

    torch._C._jit_set_texpr_fuser_enabled(False)  # it cannot compile the library's scripted scan under autocast
    model = MemoryMLP(case.width, depth=case.depth, expansion_factor=case.hidden / case.width)
    layer: Any = NeuralMemory(
        dim=case.heads * case.width, heads=case.heads, dim_head=case.width, chunk_size=case.chunk,
        batch_size=case.chunk, model=model,
    ).to(device)  # fmt: skip
    x = torch.randn(case.batch, case.tokens, case.heads * case.width, device=device, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            y: torch.Tensor = layer(x)[0]
        return y

    return _pair(run, [x])


FLA = "flash-linear-attention==0.6.0"
REFUSED = "on Hopper with Triton 3.4–3.7.0 its backward is wrong, so there it is timing only"
ALL = [
    Peer("causal attention (SDPA)", "torch", "", "quadratic in the tokens", _attention),
    Peer("gated delta rule (fla)", "fla", FLA, f"linear memory without momentum; {REFUSED}", _gated_delta),
    Peer("delta rule (fla)", "fla", FLA, "linear memory without momentum and forgetting", _delta),
    Peer(
        "titans-pytorch", "titans_pytorch", "titans-pytorch==0.5.5",
        "a whole layer with its projections, deep memory, weights refreshed every chunk", _titans_pytorch,
        launched=True,
    ),
]  # fmt: skip


def operations() -> list[Peer]:
    """The peers that are installed and run here; fla needs a GPU."""
    there = [peer for peer in ALL if importlib.util.find_spec(peer.package) is not None]
    return [peer for peer in there if peer.package != "fla" or torch.cuda.is_available()]


def model_steps(rows: int, length: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """Training steps of models of about 340M parameters from flash-linear-attention, each built when it is called; as
    CUDA graphs where they can be captured."""
    if importlib.util.find_spec("fla") is None or device.type != "cuda":
        return {}
    from fla.models import (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        TransformerConfig,
        TransformerForCausalLM,
    )
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True  # timing only, see REFUSED
    shared: dict[str, Any] = dict(hidden_size=1024, num_hidden_layers=24, vocab_size=32_000, tie_word_embeddings=True)
    shared |= dict(fuse_linear_cross_entropy=True, fuse_cross_entropy=False)

    def build(config: Any, kind: Any) -> Work:
        from titanmem.train.config import OptimConfig
        from titanmem.train.graphs import StepGraphs
        from titanmem.train.optim import make_optimizer

        model = kind(config).to(device)
        optimizer = make_optimizer(model, OptimConfig())
        ids = torch.randint(0, 32_000, (rows, length), device=device)

        def learn(inputs: dict[str, torch.Tensor], scale: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(inputs["ids"], labels=inputs["ids"]).loss
            (scale * loss).backward()
            return loss.detach(), None

        graphs = StepGraphs(learn, model.parameters())

        def step() -> None:
            graphs({"ids": ids}, 1.0)
            optimizer.step()
            graphs.clear()

        return step

    gated = GatedDeltaNetConfig(num_heads=8, head_dim=128, expand_v=1, hidden_ratio=4, **shared)
    full = TransformerConfig(num_heads=16, max_position_embeddings=length, **shared)
    steps: dict[str, Callable[[], Work]] = {"Gated DeltaNet (fla)": lambda: build(gated, GatedDeltaNetForCausalLM)}
    if importlib.util.find_spec("flash_attn") is not None:  # its attention has no other kernel
        steps["Transformer++ (fla)"] = lambda: build(full, TransformerForCausalLM)
    return steps
