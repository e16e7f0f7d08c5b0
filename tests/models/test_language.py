"""TitansLM with every kind of block: stateful, causal, independent rows, honest counts."""

from __future__ import annotations

import os
import socket
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import titanmem
from support import BLOCK_CASES, assert_close, assert_same_state, random_ids, small_model
from titanmem import ModelState, TitansConfig, TitansLM
from titanmem.blocks import BLOCKS
from titanmem.models.cost import parameters, state_bytes
from titanmem.models.sizes import SIZES
from titanmem.ops.backend import machine

every_block = pytest.mark.parametrize("case", BLOCK_CASES)


@every_block
def test_cutting_anywhere_changes_nothing(case):
    model, ids = small_model(case), random_ids(2, 23)
    whole, end = model(ids)
    for cut in (1, 4, 6, 11, 22):
        first, state = model(ids[:, :cut])
        second, state = model(ids[:, cut:], state)
        assert_close([torch.cat([first, second], 1)], [whole])
        if "attention" not in case and case != "hybrid":
            assert_same_state(state, end)


@every_block
def test_prefill_and_single_steps_equal_the_full_forward(case):
    model, ids = small_model(case), random_ids(2, 23)
    whole, end = model(ids)
    outputs, state = model(ids[:, :5])
    for t in range(5, 23):
        y, state = model(ids[:, t : t + 1], state)
        outputs = torch.cat([outputs, y], 1)
    assert_close([outputs], [whole])
    assert_same_state(state, end)


@every_block
def test_rows_that_begin_anew_forget_and_the_others_go_on(case):
    model, first, second = small_model(case), random_ids(3, 11), random_ids(3, 9, seed=1)
    _, state = model(first)
    anew = torch.tensor([True, False, True])
    mixed, end = model(second, state, anew=anew)
    fresh, start = model(second)
    gone_on, after = model(second, state)
    assert not torch.allclose(fresh, gone_on)
    assert_close([mixed[anew], mixed[~anew]], [fresh[anew], gone_on[~anew]])
    if "attention" not in case and case != "hybrid":
        assert_same_state(end, start.where(anew, after))


@every_block
def test_no_output_depends_on_a_later_token(case):
    model = small_model(case)
    for block in model.blocks:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 14, 16, generator=generator, dtype=torch.float64).requires_grad_()
        y, _, _ = block(x)
        for t in range(14):
            (grad,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
            assert (grad[:, t + 1 :] == 0).all(), f"token {t} sees the future"
            assert (grad[:, t] != 0).any()


@every_block
def test_a_row_alone_equals_the_row_in_a_padded_batch(case):
    model, ids = small_model(case), random_ids(3, 17)
    lengths = [17, 9, 13]
    left = torch.stack([torch.arange(17) >= 17 - n for n in lengths])
    right = torch.stack([torch.arange(17) < n for n in lengths])
    for mask in (left, right):
        logits, state = model(ids, mask=mask)
        more, state = model(ids, state)  # rows now stand at different offsets
        assert (logits[~mask] == 0).all()
        for row in range(3):
            kept = ids[row : row + 1, mask[row]]
            alone, end = model(kept)
            after, end = model(ids[row : row + 1], end)
            assert_close([logits[row][mask[row]], more[row]], [alone[0], after[0]])
            if "attention" not in case and case != "hybrid":  # full attention pads its rows to the longest
                assert_same_state(state.rows([row]), end)


@every_block
@pytest.mark.parametrize("cut", [None, 3, 5, 16])
def test_packed_documents_do_not_see_each_other(case, cut):
    model, ids = small_model(case), random_ids(2, 23)
    documents = torch.tensor([[0] * 5 + [1] * 9 + [2] * 9, [7] * 12 + [8] * 11])
    if cut is None:
        logits, _ = model(ids, documents=documents)
    else:
        first, state = model(ids[:, :cut], documents=documents[:, :cut])
        second, _ = model(ids[:, cut:], state, documents=documents[:, cut:])
        logits = torch.cat([first, second], 1)
    for row, borders in enumerate([(0, 5, 14, 23), (0, 12, 23)]):
        for a, b in pairwise(borders):
            alone, _ = model(ids[row : row + 1, a:b])
            assert_close([logits[row, a:b]], [alone[0]])


def test_documents_are_read_in_inference_mode_as_without_it():
    model, ids = small_model("mag"), random_ids(2, 24)
    documents = torch.tensor([[0] * 8 + [1] * 16, [7] * 24])
    expected, _ = model(ids, documents=documents)
    with torch.inference_mode():
        found, _ = model(ids, documents=documents)
    assert_close([found], [expected])


@every_block
@pytest.mark.parametrize("cut", [None, 12, 24])
def test_documents_on_chunk_borders_do_not_see_each_other(case, cut):
    """Such documents take the plain path of whole chunks; the token loop says what every gradient is."""
    model, ids = small_model(case), random_ids(2, 27)
    documents = torch.tensor([[0] * 12 + [1] * 15, [7] * 24 + [8] * 3])

    def run(ids: Tensor, documents: Tensor | None) -> Tensor:
        if documents is None or cut is None:
            return model(ids, documents=documents)[0]
        first, state = model(ids[:, :cut], documents=documents[:, :cut])
        return torch.cat([first, model(ids[:, cut:], state, documents=documents[:, cut:])[0]], 1)

    logits = run(ids, documents)
    logits.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    with titanmem.backend(memory="reference"):
        expected = run(ids, documents)
    expected.square().mean().backward()
    assert_close([logits, *grads], [expected, *(p.grad for p in model.parameters())])
    for row, borders in enumerate([(0, 12, 27), (0, 24, 27)]):
        for a, b in pairwise(borders):
            assert_close([logits[row, a:b]], [run(ids[row : row + 1, a:b], None)[0]])


@every_block
def test_documents_and_padding_together(case):
    model, ids = small_model(case), random_ids(1, 20)
    documents = torch.tensor([[0] * 8 + [1] * 12])
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, [0, 3, 9, 18, 19]] = False
    logits, state = model(ids, mask=mask, documents=documents)
    for a, b in ((0, 8), (8, 20)):
        kept = mask[0, a:b]
        alone, end = model(ids[:, a:b][:, kept])
        assert_close([logits[0, a:b][kept]], [alone[0]])
    if "attention" not in case and case != "hybrid":
        assert_same_state(ModelState(state.blocks), ModelState(end.blocks))


@every_block
def test_a_batch_without_a_real_token_changes_nothing(case):
    model, ids = small_model(case), random_ids(2, 9)
    _, state = model(ids)
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    for before in (None, state):
        logits, after, probes = model(ids, before, mask=nothing, probe=True)
        assert (logits == 0).all()
        assert len(probes) == len(model.blocks)
        assert_close([model(ids, after)[0]], [model(ids, before)[0]])


@pytest.mark.parametrize("case", ["mac", "mag", "mal", "lmm"])
def test_frozen_probes_see_no_change_even_at_a_document_start(case):
    model, ids = small_model(case), random_ids(2, 12)
    documents = torch.arange(12).expand(2, -1) // 5
    _, _, probes = model(ids, documents=documents, learn=False, probe=True)
    assert all((p.change == 0).all() and (p.loss > 0).all() for p in probes)


@every_block
def test_every_parameter_gets_a_gradient(case):
    model = small_model(case)
    logits, _ = model(random_ids(2, 15))
    logits.square().sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not (p.grad != 0).any()]
    assert silent == []


@every_block
def test_gradients_end_at_a_detached_state_and_are_the_same_before_it(case):
    model, ids = small_model(case), random_ids(2, 15)
    grads = []
    for detach in (False, True):
        loss, state = model(ids, labels=ids, detach=detach)
        assert any(x.requires_grad for _, x in state.tensors()) != detach
        assert not detach or not any(x.requires_grad for _, x in model(ids[:, :0], detach=True)[1].tensors())
        grads.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
    assert_close(*grads)


@every_block
def test_frozen_reading_keeps_the_memory(case):
    model, ids = small_model(case), random_ids(2, 15)
    _, state = model(ids)
    more = random_ids(2, 9, seed=4)
    frozen, after = model(more, state, learn=False)
    for before, now in zip(state.blocks, after.blocks, strict=True):
        memories = [s if isinstance(s, titanmem.MemoryState) else getattr(s, "memory", None) for s in (before, now)]
        if memories[0] is not None:
            assert_close(memories[1].weight, memories[0].weight, 0)
    first, between = model(more[:, :4], state, learn=False)
    second, _ = model(more[:, 4:], between, learn=False)
    assert_close([torch.cat([first, second], 1)], [frozen])


@every_block
def test_parameters_and_state_bytes_are_computed_from_the_config(case):
    model = small_model(case, dtype=torch.float32)
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        _, state = model(random_ids(1, 3))
        for token in random_ids(1, 8).T:
            _, state = model(token.unsqueeze(0), state)
    assert state.nbytes == state_bytes(model.config, tokens=11)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_have_the_parameters_their_name_says(block, size):
    config = TitansConfig.from_name(f"{block}-{size}")
    assert parameters(config) == pytest.approx(SIZES[size].target, rel=0.1)
    if size != "tiny":
        memory = config.memory_config()
        assert (memory.width, memory.chunk_len, memory.inner) == (64, 64, config.dim)
    assert TitansConfig.from_name(f"{block}-{size}-chunk16").memory_config().chunk_len == 16


@pytest.mark.parametrize("case", ["mac", "mag", "mal", "lmm"])
def test_compile_sees_one_node_per_memory_call(case):
    model = small_model(case, dtype=torch.float32, num_persistent=0)
    ids = random_ids(2, 12)
    nodes = []

    def count(graph, _):
        nodes.append(sum("memory_scan" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    logits, _ = compiled(ids)
    assert_close([logits.detach()], [model(ids)[0].detach()], 1e-4)
    segments = 2 if case == "mac" else 1  # MAC is sequential over its segments
    assert nodes == [2 * segments]  # two layers, three chunks each, no loop unrolled


@pytest.mark.skipif(machine() is not None, reason=str(machine()))
def test_compile_takes_a_model_on_kernels_whole():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = {"chunk_len": 16, "num_heads": 2, "expansion": 2}
    model = small_model("lmm", dtype=torch.float32, layers=1, memory=memory).to(device)
    ids = random_ids(2, 20).to(device)
    torch._dynamo.reset()
    with titanmem.backend(memory="triton"):
        logits, _ = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)
        assert_close([logits.detach()], [model(ids)[0].detach()], 1e-4)


@pytest.mark.parametrize("case", ["mac", "mag", "mal", "lmm"])
def test_compiled_training_has_the_same_gradients(case):
    model = small_model(case, dtype=torch.float32)
    ids = random_ids(2, 15)
    model(ids)[0].square().mean().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids)[0].square().mean().backward()
    assert_close([p.grad for p in model.parameters()], eager, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mac", "mag", "mal", "lmm", "attention"])
def test_inductor_compiles_forward_and_backward(case):
    model = small_model(case, dtype=torch.float32, layers=1)
    ids = random_ids(2, 15)
    expected = model(ids)[0].detach()
    torch._dynamo.reset()
    logits, _ = torch.compile(model, fullgraph=True)(ids)
    logits.square().mean().backward()
    assert_close([logits.detach()], [expected], 1e-4)


def test_compiled_decoding_equals_eager():
    model = small_model("mac", dtype=torch.float32)
    ids = random_ids(2, 20)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        whole, _ = model(ids)
        _, state = model(ids[:, :9])
        for t in range(9, 20):
            y, state = step(ids[:, t : t + 1], state)
            assert_close([y], [whole[:, t : t + 1]], 1e-4)


def two_steps(rank, port, blocks):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for case in blocks:
        model = torch.nn.parallel.DistributedDataParallel(small_model(case, dtype=torch.float32))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for seed in range(2):
            optimiser.zero_grad()
            model(random_ids(2, 13, seed=2 * seed + rank))[0].square().mean().backward()
            optimiser.step()
        total = torch.stack([p.detach().double().sum() for p in model.parameters()])
        other = total.clone()
        torch.distributed.broadcast(other, 0)
        assert torch.equal(total, other)
    torch.distributed.destroy_process_group()


def test_plain_distributed_data_parallel_takes_two_steps():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(two_steps, (port, ["mac", "mag", "mal", "lmm", "hybrid"]), nprocs=2)


def test_a_stream_of_200_000_tokens_runs_in_constant_memory():
    model = small_model("mac", dtype=torch.float32, segment_len=256, memory={"chunk_len": 64, "num_heads": 2})
    state, sizes = None, []
    page = os.sysconf("SC_PAGE_SIZE")
    with torch.no_grad():
        for piece in range(50):
            logits, state = model(random_ids(1, 4096, seed=piece), state)
            with open("/proc/self/statm") as file:
                sizes.append(int(file.read().split()[1]) * page)
    assert torch.isfinite(logits).all()
    assert max(sizes[10:]) <= 1.05 * sizes[9]


def test_a_model_survives_saving(tmp_path):
    model = small_model("hybrid", dtype=torch.float32)
    model.save(tmp_path / "model")
    loaded = TitansLM.load(tmp_path / "model")
    ids = random_ids(1, 9)
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    with pytest.warns(UserWarning, match="trained with chunk_len=4 and is loaded with 8"):
        TitansLM.load(tmp_path / "model", memory={"chunk_len": 8, "num_heads": 2, "expansion": 2})
    with pytest.raises(FileNotFoundError, match="has no config"):
        TitansLM.load(tmp_path)


def test_memory_settings_are_merged_and_presets_fit_in():
    config = TitansConfig.from_name("mag-tiny", memory={"depth": 1}).memory_config()
    assert (config.depth, config.chunk_len, config.expansion) == (1, 16, 2)
    preset = titanmem.MemoryConfig.preset("gated-delta", 16, num_heads=2)
    model = TitansLM(TitansConfig(40, 16, 1, 2, block="lmm", memory=preset))
    assert model.config.memory_config() == preset
    assert TitansConfig.from_dict(model.config.to_dict()) == model.config
    assert torch.isfinite(model(random_ids(1, 9))[0]).all()


def test_mistakes_are_explained():
    model, ids = small_model("mac"), random_ids(2, 5)
    other = small_model("mac", segment_len=9)
    cases = [
        (lambda: model(ids.float()), "ids must be an int64 tensor"),
        (lambda: model(ids[0]), r"ids\.unsqueeze\(0\) is a batch of one row"),
        (lambda: model(ids - 99), r"ids must lie in 0 … 39, got -"),
        (lambda: model(ids + 40), "check that the tokenizer belongs to this model"),
        (lambda: model(ids[:0]), "batch of 0 rows"),
        (lambda: model(ids, mask=torch.ones(2, 4, dtype=torch.bool)), "mask must be a bool tensor"),
        (lambda: model(ids, documents=ids[:, :3]), "documents must be integers of the shape of ids"),
        (lambda: model(ids, documents=ids - 99), "document ids must not be negative"),
        (lambda: model(ids, model(ids[:1])[1]), "the state holds 1 rows, ids has 2"),
        (lambda: model(ids, other(ids)[1]), "segment_len: expected 6, got 9"),
        (lambda: TitansConfig(40, 16, 2, 2, block="mad"), "unknown block 'mad'; known: mac"),
        (lambda: TitansConfig(40, 16, 2, 2, block=["mac"]), "lists 1 names for num_layers=2"),
        (lambda: TitansConfig(40, 15, 2, 2), "attention heads of even width"),
        (lambda: TitansConfig(40, 16, 2, 2, memory={"chunklen": 3}), "did you mean 'chunk_len'"),
        (lambda: TitansConfig(40, 16, 2, 2, windowlen=4), "no setting 'windowlen'; did you mean 'window_len'"),
        (lambda: TitansConfig.from_name("mac-3b"), "unknown model 'mac-3b'; did you mean 'mac-1.3b'"),
        (lambda: TitansConfig(40, 16, 2, 2, mlp_width=0), "mlp_width must be a whole number of at least 1, got 0"),
        (lambda: TitansConfig(40, 16, 2, 2, memory={"depth": 1.5}), "depth must be a whole number"),
        (lambda: model.generate(ids.tolist()), r"use torch\.tensor"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    logits, state = model(ids[:, :0])
    assert logits.shape == (2, 0, 40)
    assert_close([model(ids, state)[0]], [model(ids)[0]], 0)
