"""What the optimiser does with which parameters."""

import pytest
import torch

from support import small_model
from titanmem.train.config import OptimConfig
from titanmem.train.optim import make_optimizer
from titanmem.train.parallel import repeatable


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_gates_move_at_their_own_rate_and_nothing_else_does(pace):
    model = small_model("mag", dtype=torch.float32)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.0, gate_rate=pace))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # the first step of Adam is then the rate itself
    optimizer.set_rate(1e-3)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()).mean().item()
        assert moved == pytest.approx(1e-3 * (pace if ".gates." in name else 1), rel=1e-3), name


@pytest.mark.parametrize("rate", [0.0, float("inf")])
def test_a_gate_rate_that_is_not_positive_and_finite_is_refused(rate):
    with pytest.raises(ValueError, match=rf"optim\.gate_rate must be positive and finite, got {rate}"):
        OptimConfig(gate_rate=rate)


def test_what_is_saved_of_the_optimiser_does_not_know_paces():
    model = small_model("lmm", dtype=torch.float32)
    plain, paced = (make_optimizer(model, OptimConfig(gate_rate=rate)).state_dict() for rate in (1.0, 3.0))
    assert len(plain["param_groups"]) == 2  # as before there were paces: runs of earlier versions go on
    assert plain["param_groups"][0].keys() == paced["param_groups"][0].keys()
    assert "pace" not in plain["param_groups"][0]


@pytest.mark.parametrize("before", [False, True])
def test_repeatable_runs_leave_torch_as_it_was(before):
    torch.use_deterministic_algorithms(before, warn_only=before)
    flags = torch.utils.deterministic.fill_uninitialized_memory
    try:
        with repeatable(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            with repeatable(False):
                assert not torch.are_deterministic_algorithms_enabled()
            assert torch.are_deterministic_algorithms_enabled()
        with repeatable(None):
            assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory == flags
    finally:
        torch.use_deterministic_algorithms(False)
