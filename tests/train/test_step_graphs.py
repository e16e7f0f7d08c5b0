"""Steps by CUDA graphs are the steps that they are without.

Without a GPU the work is repeated on the graph's buffers, and whatever asks for a value, which a graph cannot, is an
error.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import Blind, random_ids, small_model
from titanmem import TitansLM
from titanmem.graphs import Again, Graph
from titanmem.train.graphs import StepGraphs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = ["mac", "mac-fixed", "mag", "mal", "lmm", "attention", "attention-window", "rmt", "summary", "hybrid"]
SHAPES = [(2, 24), (3, 17), (2, 24), (2, 24), (3, 17), (3, 17), (2, 24)]  # whole segments and chunks, and not


def steps_of(model: TitansLM, capture: type | None, shapes=SHAPES) -> tuple[list[float], StepGraphs | None]:
    """Losses of steps of two micro-batches each, of one shape or of two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def learn(inputs: dict[str, Tensor], scale: Tensor) -> Tensor:
        loss, _ = model(**inputs)
        (loss * scale).backward()
        return loss.detach()

    graphs = None if capture is None else StepGraphs(learn, model.parameters(), capture=capture)
    losses = []
    for number, (rows, tokens) in enumerate(shapes):
        total = 0.0
        for part in range(2):
            ids = random_ids(rows, tokens - part * (number % 2), seed=2 * number + part)
            inputs, scale = {"ids": ids, "labels": ids.roll(-1, 1)}, 1 / (ids.numel() + part)
            if graphs is None:
                here = {name: x.to(DEVICE) for name, x in inputs.items()}
                total += learn(here, torch.tensor(scale, device=DEVICE)).item()
            else:
                total += graphs(inputs, scale).item()
        optimizer.step()
        optimizer.zero_grad() if graphs is None else graphs.clear()
        losses.append(total)
    return losses, graphs


@pytest.mark.parametrize("case", CASES)
def test_training_by_graphs_gives_the_losses_of_training_without(case):
    plain, _ = steps_of(small_model(case, segment_len=8).to(DEVICE), None)
    losses, graphs = steps_of(small_model(case, segment_len=8).to(DEVICE), Graph if GPU else Blind)
    assert graphs.captured >= 2
    assert losses == pytest.approx(plain, rel=1e-9)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)


def test_parameters_without_a_gradient_stay_without():
    model = small_model("lmm").to(DEVICE)
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=DEVICE))
    model.register_parameter("unused", unused)
    steps_of(model, Graph if GPU else Again, SHAPES[:1] * 4)
    assert unused.grad is None
    assert unused.tolist() == [1, 1, 1]


def test_what_cannot_be_captured_is_said_once_and_launched(capsys):
    class Broken(Again):
        def __init__(self, warm, work, pool):
            warm()  # adds gradients that must go again
            raise RuntimeError("operation not permitted\nsecond line")

    plain, _ = steps_of(small_model("mac").to(DEVICE), None)
    losses, graphs = steps_of(small_model("mac").to(DEVICE), Broken)
    assert graphs.captured == 0
    assert losses == pytest.approx(plain, rel=1e-9)
    assert capsys.readouterr().out.count("operation not permitted") == 1
