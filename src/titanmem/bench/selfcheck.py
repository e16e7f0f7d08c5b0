"""Whether this machine computes what the specification says: small models of every variant, forward and backward.

What is right is the token loop in float64 on the CPU. How far rounding alone takes one from it is what plain torch
says, in the same precision on the same device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from titanmem.models.language import TitansConfig, TitansLM
from titanmem.ops import backend

EXACT = {"memory": "reference", "streams": "torch", "attention": "reference", "loss": "torch"}
PLAIN = {"memory": "chunked", "streams": "torch", "attention": "sdpa", "loss": "torch"}
GATES = ("step", "momentum", "forget")
KERNELS = {"memory": "triton", "streams": "triton", "loss": "triton"}
MOST = 0.1  # an error of all gradients that no rounding makes
LOST = 0.5  # of a single one: it is missing, or another
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Check:
    """One model: ‖g − exact‖ / ‖exact‖ of all its gradients, as this machine computes them and in plain torch, which
    of them are far off by themselves, or why it could not compute them."""

    name: str
    error: float
    plain: float
    lost: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def right(self) -> bool:
        return not self.lost and self.error <= min(MOST, 2 * self.plain + torch.finfo(torch.float32).eps)


def small_models(chunk_len: int = 64, width: int = 64) -> Iterator[tuple[str, TitansConfig]]:
    """Models in which every kernel of the usual shapes has work."""
    lmm = [("lmm", hidden, to) for hidden in (1, 2, 4) for to in ("zero", "start")]
    for block, hidden, to in [*lmm, ("mac", 1, "zero"), ("mag", 1, "start"), ("mal", 1, "start")]:
        config = TitansConfig(
            256, 2 * width, 2, 2, block, segment_len=2 * chunk_len, window_len=chunk_len, num_persistent=chunk_len,
            memory={"chunk_len": chunk_len, "num_heads": 2, "expansion": hidden, "forget_to": to},
        )  # fmt: skip
        yield f"{block}, hidden {hidden}×, forgets to {to}", config


def check_models(device: torch.device, models: Iterator[tuple[str, TitansConfig]]) -> Iterator[Check]:
    """Every model with the kernels that this machine can run, if there are any."""
    forms = KERNELS if backend.machine() is None else {}
    half = device.type == "cuda"
    for name, config in models:
        torch.manual_seed(0)
        model = TitansLM(config)
        ids = torch.randint(0, config.vocab_size, (2, 3 * config.memory_config().chunk_len + 1))
        exact = gradients(copy.deepcopy(model).double(), ids, EXACT, False)
        model, ids = model.to(device), ids.to(device)
        plain = gradients(model, ids, PLAIN, half)
        try:
            found = gradients(model, ids, forms, half)
            yield Check(name, distance(found, exact), distance(plain, exact), lost(found, plain, exact))
        except Exception as error:  # compilers and drivers have many
            trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield Check(name, math.nan, distance(plain, exact), trouble=trouble)


def distance(found: Gradients, exact: Gradients) -> float:
    """Of all gradients together, relative to the exact ones."""
    of_all, norm = (torch.stack([x.norm() for x in xs]).norm() for xs in (_differences(found, exact), exact.values()))
    return float(of_all / norm)


def lost(found: Gradients, plain: Gradients, exact: Gradients) -> tuple[str, ...]:
    """Those that are far off. Small ones would not show among the others."""
    names = []
    for (name, right), off, usual in zip(
        exact.items(), _differences(found, exact), _differences(plain, exact), strict=True
    ):
        if not off.norm() <= max(LOST * right.norm(), 2 * usual.norm()):
            names.append(name)
    return tuple(names)


def _differences(found: Gradients, exact: Gradients) -> list[Tensor]:
    return [found[name] - right for name, right in exact.items()]


def gradients(model: TitansLM, ids: Tensor, forms: Mapping[str, str], half: bool) -> dict[str, Tensor]:
    """Of the loss of a batch, of all parameters, those of the gates one by one; in float64 on the CPU."""
    autocast = torch.autocast("cuda", torch.bfloat16) if half else nullcontext()
    with backend.backend(**forms), autocast:
        loss, _ = model(ids[:, :-1], labels=ids[:, 1:])
    names, weights = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    pieces: dict[str, Tensor] = {}
    for name, x in zip(names, (x.double().cpu() for x in found), strict=True):
        if ".gates.linear." in name:
            pieces |= {f"{name}, {kind}": part for kind, part in zip(GATES, x.chunk(len(GATES)), strict=True)}
        else:
            pieces[name] = x
    return pieces
