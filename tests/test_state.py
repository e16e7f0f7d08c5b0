"""State is a value."""

from __future__ import annotations

import pytest
import torch

import titanmem
from support import BLOCK_CASES, assert_close, assert_same_state, random_ids, small_model
from titanmem import MemoryState, ModelState


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_save_and_load_are_bitwise(case, tmp_path):
    model, ids = small_model(case), random_ids(2, 9)
    _, state = model(ids, documents=torch.zeros_like(ids))
    state.save(tmp_path / "state.safetensors")
    loaded = ModelState.load(tmp_path / "state.safetensors")
    assert loaded.config == state.config
    for (name, a), (other, b) in zip(loaded.tensors(), state.tensors(), strict=True):
        assert name == other
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    assert torch.equal(model(ids, loaded)[0], model(ids, state)[0])


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_rows_stack_and_split_at_different_positions(case):
    model = small_model(case)
    prompts = [random_ids(1, n, seed=n) for n in (12, 7, 9)]  # one of them at a chunk and segment border
    states = [model(p)[1] for p in prompts]
    more = random_ids(3, 8, seed=1)
    logits, after = model(more, ModelState.stack(states))
    for row, (state, part) in enumerate(zip(states, after.split(), strict=True)):
        alone, end = model(more[row : row + 1], state)
        assert_close([logits[row : row + 1]], [alone])
        again = random_ids(1, 3, seed=2)
        assert_close([model(again, part)[0]], [model(again, end)[0]])


def test_a_state_never_changes_and_forks_are_free():
    model, ids = small_model("mac"), random_ids(2, 9)
    _, state = model(ids)
    before = state.clone()
    fork = state.fork(2)
    a, _ = model(random_ids(4, 5), fork)
    b, _ = model(random_ids(4, 5)[:2], state.rows([0, 0]))
    assert_close([a[:2]], [b])
    model.generate(ids, 4, state=state, temperature=0)
    assert_same_state(state, before, 0)


def test_detach_cuts_the_graph_and_to_moves_and_rounds():
    model, ids = small_model("lmm"), random_ids(1, 6)
    _, state = model(ids)
    assert any(x.requires_grad for _, x in state.tensors())
    assert not any(x.requires_grad for _, x in state.detach().tensors())
    half = state.detach().to(dtype=torch.bfloat16)
    kinds = {x.dtype for _, x in half.tensors()}
    assert kinds == {torch.bfloat16, torch.int64}
    assert half.nbytes < state.nbytes
    assert state.to("meta").blocks[0].fast.start_weight[0].is_meta


def test_bad_files_are_refused_with_the_reason(tmp_path):
    model, ids = small_model("lmm"), random_ids(1, 6)
    path = tmp_path / "state.safetensors"
    model(ids)[1].save(path)
    with pytest.raises(ValueError, match="holds a ModelState, expected a MemoryState"):
        MemoryState.load(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"state.safetensors is not a readable state file"):
        ModelState.load(path)
    with pytest.raises(FileNotFoundError, match="no state file"):
        ModelState.load(tmp_path / "other")
    model.save(tmp_path)
    with pytest.raises(ValueError, match="holds 'pt'"):
        ModelState.load(tmp_path / "model.safetensors")


def test_states_of_different_models_do_not_stack():
    a, b = (small_model("lmm", window_len=w)(random_ids(1, 6))[1] for w in (7, 8))
    with pytest.raises(ValueError, match="window_len: expected 7, got 8"):
        ModelState.stack([a, b])
    with pytest.raises(ValueError, match="at least one state"):
        ModelState.stack([])


def test_the_host_knows_the_offset_that_rows_share():
    """So that decoding never waits for the device."""
    mem = titanmem.NeuralMemory(dim=8, num_heads=1, chunk_len=4)
    with torch.no_grad():
        _, state = mem(torch.randn(2, 6, 8))
        for expected in (2, 3, None, 1, 2):
            pending = state.fast.pending
            assert (None if pending is None else pending.filled) == expected
            assert pending is None or (pending.offset == expected).all()
            _, state = mem(torch.randn(2, 1, 8), state)
        _, ragged = mem(torch.randn(2, 3, 8), mask=torch.tensor([[True] * 3, [True, False, True]]))
    assert ragged.fast.pending.filled is None
