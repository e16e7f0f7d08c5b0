"""What the optimiser does with which parameters."""

import pytest
import torch

from support import small_model
from titanmem.train.config import OptimConfig
from titanmem.train.optim import make_optimizer, set_rate
from titanmem.train.parallel import repeatable


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_gates_move_at_their_own_rate_and_nothing_else_does(pace):
    model = small_model("mag", dtype=torch.float32)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.0, gate_rate=pace))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # the first step of Adam is then the rate itself
    set_rate(optimizer, 1e-3)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()).mean().item()
        assert moved == pytest.approx(1e-3 * (pace if ".gates." in name else 1), rel=1e-3), name


def test_a_gate_rate_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"optim\.gate_rate must be positive, got 0"):
        OptimConfig(gate_rate=0.0)


@pytest.mark.parametrize("before", [False, True])
def test_repeatable_runs_leave_torch_as_it_was(before):
    torch.use_deterministic_algorithms(before, warn_only=before)
    flags = torch.utils.deterministic.fill_uninitialized_memory
    try:
        with repeatable(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with repeatable(False):
            assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory == flags
    finally:
        torch.use_deterministic_algorithms(False)
