"""Long rows in pieces, several layers at work at once: the same numbers, whatever the pieces."""

from __future__ import annotations

from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch

from support import RTOL, assert_close, assert_same_state, random_ids, small_model
from titanmem import TitansConfig, TitansLM, backend
from titanmem.blocks.base import Block
from titanmem.blocks.mac import MACBlock
from titanmem.blocks.mag import MAGBlock
from titanmem.graphs import AUTO, Branches, Graph, branched
from titanmem.models import wave
from titanmem.train.config import ParallelConfig
from titanmem.train.graphs import StepGraphs
from titanmem.train.parallel import Ranks, Spread

GPU = torch.cuda.is_available()
CASES = ["mac", "mac-fixed", "mag", "mal", "lmm", "attention-window", "mixed"]


def cut_model(case: str, **changes: object):
    """Chunks of 4, segments and windows of 8: pieces end at multiples of 8."""
    if case == "mixed":
        changes |= {"block": ["mag", "mac", "lmm"], "num_layers": 3}
        case = "lmm"
    elif case == "attention-window":
        changes |= {"block": ["attention", "lmm"]}
    return small_model(case, segment_len=8, **({"window_len": 8, "attention_window": 4} | changes))


def learn(model, ids, pieces, state=None, **given):
    model.zero_grad()
    with branched(pieces):
        loss, after = model(ids, state, labels=ids.roll(-1, 1), **given)
    (loss + sum(x.square().sum() for _, x in after.tensors() if x.requires_grad)).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], after.detach()


@pytest.fixture
def seen(monkeypatch):
    """Into how many pieces rows were cut, call by call."""
    counts, through = [], wave.through
    monkeypatch.setattr(wave, "through", lambda *given: counts.append(given[-1]) or through(*given))
    return counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [2, 3])
def test_rows_in_pieces_have_the_losses_states_and_gradients_of_whole_rows(case, pieces, seen):
    model = cut_model(case)
    state = None
    for seed, given in enumerate([{}, {"anew": torch.tensor([False, True])}, {"detach": True}]):
        ids = random_ids(2, 48, seed=seed)
        found, after = learn(model, ids, pieces, state, **given)
        expected, state = learn(model, ids, 1, state, **given)
        assert_close(found, expected)
        assert_same_state(after, state)
    assert seen == [pieces] * 3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [3, 6])
def test_reading_in_pieces_leaves_the_state_of_whole_rows(case, pieces, seen):
    """Without gradients pieces may be shorter than a window, which is then full or not."""
    model, state = cut_model(case, window_len=20, attention_window=20), None
    if "mac" in case or case == "mixed":
        pieces = 3
    for seed in range(3):
        ids = random_ids(2, 24, seed=seed)
        with torch.no_grad():
            with branched(pieces):
                found, after = model(ids, state)
            expected, state = model(ids, state)
        assert_close([found], [expected])
        assert_same_state(after, state)
    assert seen == [pieces] * 3


def test_gradients_go_back_through_states_from_call_to_call(seen):
    model, ids = cut_model("mal"), random_ids(2, 48)
    found = []
    for pieces in (1, 3):
        model.zero_grad()
        with branched(pieces):
            _, state = model(ids[:, :24])
            loss, _ = model(ids[:, 24:], state, labels=ids[:, 24:], detach=True)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert_close(found[1], found[0])
    assert seen == [3, 3]


def test_branches_begin_when_all_that_they_read_is_there(monkeypatch):
    model, known = cut_model("lmm"), set()

    class Noting(Branches):
        def __init__(self, count, given, parameters):
            known.update(x.data_ptr() for x in given)
            super().__init__(count, given, parameters)

    def forward(x, state, context, forward=model.blocks[0].forward):
        assert {x.data_ptr(), *(() if context.anew is None else (context.anew.data_ptr(),))} <= known
        assert context.full or {t.data_ptr() for _, t in state.tensors()} <= known
        return forward(x, state, context)

    monkeypatch.setattr(wave, "Branches", Noting)
    monkeypatch.setattr(model.blocks[0], "forward", forward)
    with branched(3):
        model(random_ids(2, 24), model.start(2), anew=torch.tensor([True, False]))


def test_weights_are_cast_anew_for_every_piece(seen):
    """On another stream a cast may be gone while it is read, and its gradient would make branches wait."""
    model, ids = cut_model("lmm", layers=1).float(), random_ids(1, 24)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with branched(3), torch.autocast("cpu", torch.bfloat16), hooks:
        model(ids, labels=ids)
    shape = model.blocks[0].memory.layer.qkv.weight.mT.shape
    casts = {x.untyped_storage().data_ptr() for x in kept if x.dtype == torch.bfloat16 and x.shape == shape}
    assert len(casts) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked by dynamo of every input
@pytest.mark.parametrize("case", ["lmm", "mal", "mag", "mac"])
def test_compiled_blocks_stay_compiled_whatever_the_pieces(case, monkeypatch):
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(Block, "compile", partialmethod(Block.compile, backend="eager"))
    for other in (MACBlock, MAGBlock):
        monkeypatch.setattr(other, "compile", partialmethod(other.compile, backend="eager"))
    model = cut_model(case, layers=3).float()
    spread = Spread(model, ParallelConfig(compile=True), Ranks(0, 1, torch.device("cpu"), None))
    state = None
    for pieces in (4, 1, 2):
        spread.pieces = pieces
        ids = random_ids(2, 64)
        loss, state = spread.loss({"ids": ids, "labels": ids}, state)
        loss.backward()
        with torch.no_grad():
            spread.forward(ids[:, :32])
    assert not [reason for reason in counters["unimplemented"] if "limit" in reason], counters["unimplemented"]
    assert counters["stats"]["unique_graphs"] > 3


def test_pieces_end_where_chunks_segments_and_windows_do():
    with branched(3):
        for case, border in {"lmm": 4, "mac": 8, "mag": 8, "mal": 8}.items():
            blocks = cut_model(case).blocks
            counts = [wave.pieces_of(blocks, torch.empty(1, tokens, 16)) for tokens in (3 * border, 3 * border + 4, 4)]
            assert counts == [3, 1, 1]
        for case in ("attention", "rmt", "hybrid"):  # no memory, or a state that grows
            assert wave.pieces_of(small_model(case).blocks, torch.empty(1, 840, 16)) == 1


def test_as_many_pieces_as_a_gpu_has_room_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))

    def counts(name: str, *shapes: tuple[int, int]) -> list[int]:
        with torch.device("meta"):
            blocks = TitansLM(TitansConfig.from_name(name, num_layers=1)).blocks
        given = [SimpleNamespace(shape=(*shape, 1024), is_cuda=True, device="cuda") for shape in shapes]
        assert [wave.pieces_of(blocks, x) for x in given] == [1] * len(shapes)  # nobody asks for it
        with branched(AUTO):
            assert wave.pieces_of(blocks, torch.empty(1, 32_768, 1)) == 1  # on a CPU
            return [wave.pieces_of(blocks, x) for x in given]

    shapes = [(1, 32_768), (2, 16_384), (4, 8192), (8, 4096), (16, 2048), (1, 4096), (1, 8192), (1, 32_768 + 64)]
    assert counts("lmm-340m", *shapes) == [4, 4, 2, 1, 1, 1, 2, 3]
    assert counts("mal-340m", *shapes) == [4, 4, 1, 1, 1, 1, 2, 1]
    assert counts("mag-340m", *shapes) == [4, 1, 1, 1, 1, 1, 2, 1]
    assert counts("mac-340m", *shapes) == [4, 4, 4, 4, 2, 1, 2, 1]
    assert counts("attention-340m", *shapes) == [1] * len(shapes)
    with torch.no_grad():  # reading
        shapes = [(1, 4096), (1, 2048), (1, 512), (1, 64), (2, 4096), (8, 4096)]
        assert counts("lmm-340m", *shapes) == [8, 8, 2, 1, 4, 1]
        assert counts("mal-340m", *shapes) == [8, 8, 2, 1, 4, 1]
        assert counts("mag-340m", *shapes) == [8, 8, 2, 1, 1, 1]
        assert counts("mac-340m", *shapes) == [8, 4, 1, 1, 8, 4]


def test_a_training_step_cuts_its_rows_where_there_are_graphs(seen):
    model = cut_model("lmm")
    spread = Spread(model, ParallelConfig(pieces=3), Ranks(0, 1, torch.device("cpu"), None))
    ids = random_ids(2, 24)
    given = {"ids": ids, "labels": ids.roll(-1, 1)}
    whole, _ = spread.loss(given)
    assert seen == []  # no graphs without a GPU, so no branches
    spread.pieces = 3
    cut, _ = spread.loss(given)
    assert seen == [3]
    assert_close([cut], [whole])
    spread.forward(**given)
    assert seen == [3]  # only training


def test_padding_documents_probes_and_traces_leave_rows_whole(monkeypatch):
    model, ids = cut_model("lmm"), random_ids(2, 24)
    monkeypatch.setattr(wave, "through", lambda *given: pytest.fail("cut"))
    with branched(2):
        model(ids, mask=torch.ones(2, 24, dtype=torch.bool))
        model(ids, documents=torch.zeros(2, 24, dtype=torch.int64))
        model(ids, probe=True)
        model.hidden(ids, trace=[])
        with pytest.raises(pytest.fail.Exception, match="cut"):
            model(ids)


@pytest.mark.skipif(not GPU, reason="branches are those of CUDA graphs")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [2, 4])
def test_branches_of_a_graph_give_the_losses_and_gradients_of_one_stream(case, pieces, seen):
    found = []
    for count in (1, pieces):
        model = cut_model(case).cuda()

        def work(inputs, scale, state, model=model):
            loss, after = model(**inputs, state=state)
            (loss * scale).backward()
            return loss.detach(), after.detach()

        graphs, state, losses = StepGraphs(work, model.parameters()), model.start(2).detach(), []
        for step in range(8):
            ids = random_ids(2, 64, seed=step)
            with branched(count):
                loss, state = graphs({"ids": ids, "labels": ids.roll(-1, 1)}, 1.0, state)
            losses.append(loss.cpu())
        assert graphs.captured == 1
        assert count == 1 or set(seen) == {count}
        found.append((losses + [p.grad.cpu() for p in model.parameters() if p.grad is not None], state.to("cpu")))
    (whole, before), (cut, after) = found
    assert_close(cut, whole, 10 * RTOL)
    assert_same_state(after, before, 10 * RTOL)


@pytest.mark.skipif(not GPU, reason="kernels in branches need a GPU")
@pytest.mark.parametrize("case", ["lmm", "mac", "mag", "mal"])
@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_kernels_in_branches_are_as_near_to_the_truth_as_on_one_stream(case, forget_to):
    shape = dict(dim=128, num_heads=2, segment_len=256, window_len=256, mlp_width=128, num_persistent=64)
    memory = {"chunk_len": 64, "num_heads": 2, "expansion": 1, "forget_to": forget_to}
    model = small_model(case, layers=3, dtype=torch.float32, memory=memory, **shape).cuda()
    ids = random_ids(1, 2048).cuda()

    def run(pieces: int, dtype: torch.dtype):
        low = small_model(case, layers=3, dtype=dtype, memory=memory, **shape).cuda()
        low.load_state_dict(model.state_dict())

        def work():
            low.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
                loss, _ = low(ids, labels=ids.roll(-1, 1), detach=True)
            (loss / ids.numel()).backward()
            return [loss.detach(), *(p.grad for p in low.parameters() if p.grad is not None)]

        with branched(pieces):
            return [x.double() for x in Graph(work, work, None)()]

    with backend(memory="chunked", attention="sdpa"):
        truth = run(1, torch.float64)
    torch.cuda.synchronize()
    errors = []
    for pieces in (1, 2, 8):
        found = run(pieces, torch.float32)
        torch.cuda.synchronize()
        errors.append([float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)])
    for one, *cut in zip(*errors, strict=True):
        assert max(cut) <= 2 * one + 1e-3, (one, cut)
