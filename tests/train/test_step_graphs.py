"""Steps by CUDA graphs are the steps that they are without.

Without a GPU the work is repeated on the graph's buffers, and whatever asks for a value, which a graph cannot, is an
error.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import Blind, assert_same_state, random_ids, small_model
from titanmem import ModelState, TitansLM
from titanmem.graphs import Again, Graph
from titanmem.train.graphs import StepGraphs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = ["mac", "mac-fixed", "mag", "mal", "lmm", "attention", "attention-window", "rmt", "summary", "hybrid"]
SHAPES = [(2, 24), (3, 17), (2, 24), (2, 24), (3, 17), (3, 17), (2, 24)]  # whole segments and chunks, and not


def new_learn(model: TitansLM):
    def learn(inputs: dict[str, Tensor], scale: Tensor, state: ModelState | None):
        loss, after = model(**inputs, state=state)
        (loss * scale).backward()
        return loss.detach(), None if state is None else after.detach()

    return learn


def steps_of(model: TitansLM, capture: type | None, shapes=SHAPES) -> tuple[list[float], StepGraphs | None]:
    """Losses of steps of two micro-batches each, of one shape or of two."""
    optimizer, learn = torch.optim.AdamW(model.parameters(), lr=1e-2), new_learn(model)
    graphs = None if capture is None else StepGraphs(learn, model.parameters(), capture=capture)
    losses = []
    for number, (rows, tokens) in enumerate(shapes):
        total = 0.0
        for part in range(2):
            ids = random_ids(rows, tokens - part * (number % 2), seed=2 * number + part)
            inputs, scale = {"ids": ids, "labels": ids.roll(-1, 1)}, 1 / (ids.numel() + part)
            if graphs is None:
                here = {name: x.to(DEVICE) for name, x in inputs.items()}
                total += learn(here, torch.tensor(scale, device=DEVICE), None)[0].item()
            else:
                total += graphs(inputs, scale)[0].item()
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


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("attention", "hybrid")])  # keep every token
def test_carried_states_go_through_graphs(case):
    found = []
    for capture in (None, Graph if GPU else Blind):
        model = small_model(case, segment_len=8).to(DEVICE)
        optimizer, learn = torch.optim.SGD(model.parameters(), lr=1e-3), new_learn(model)
        graphs = StepGraphs(learn, model.parameters(), capture=capture or Again)
        lanes, losses = [model.start(2).detach() for _ in range(2)], []
        for step in range(6):
            for lane in range(2):
                ids = random_ids(2, 24, seed=2 * step + lane)  # whole segments and chunks
                anew = torch.tensor([step % 3 == lane, step == 4])
                inputs, scale = {"ids": ids, "labels": ids.roll(-1, 1), "anew": anew}, 1 / ids.numel()
                if capture is None:
                    here = {name: x.to(DEVICE) for name, x in inputs.items()}
                    loss, lanes[lane] = learn(here, torch.tensor(scale, device=DEVICE), lanes[lane])
                else:
                    loss, lanes[lane] = graphs(inputs, scale, lanes[lane])
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad() if capture is None else graphs.clear()
        found.append((losses, lanes))
        assert capture is None or graphs.captured >= 1
    (plain, before), (losses, after) = found
    assert losses == pytest.approx(plain, rel=1e-9)
    for one, other in zip(after, before, strict=True):
        assert_same_state(one, other, rtol=1e-9)


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
