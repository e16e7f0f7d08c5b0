"""Sessions in slots get what they would get alone, by steps that a CUDA graph can repeat.

Without a GPU the steps run without a graph, and whatever asks for a value, which a graph cannot, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from small import byte_engine, byte_model, same
from support import Blind, assert_close, assert_same_state, small_model
from titanmem import TitansLM, backend
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.graphs import Again, Graph
from titanmem.infer import Engine
from titanmem.infer.graphs import Pieces, Seat, Slots
from titanmem.infer.session import Session
from titanmem.ops.backend import machine
from titanmem.state import ModelState

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RTOL = 1e-9  # float64
CASES = ["mac", "mac-fixed", "mag", "mal", "lmm", "attention-window", "summary", "mac-lmm"]


def make(case: str, **changes: int) -> TitansLM:
    block = {"block": ["mac", "lmm", "mag"], "num_layers": 3} if case == "mac-lmm" else {}
    model = small_model("mac" if block else case, **block, **changes)
    return model.to(DEVICE).eval().requires_grad_(False)


def make_slots(model: TitansLM, learn: bool = True) -> Slots:
    return Slots(model, learn, Graph if GPU else Blind)


@torch.no_grad()
def read(model: TitansLM, tokens: int, seed: int) -> ModelState:
    ids = torch.randint(0, 39, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return model(ids.to(DEVICE))[1] if tokens else model.start(1)


def ids_from(seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(0, 40, (), generator=generator))


@torch.no_grad()
def one(model: TitansLM, token: int, state: ModelState, learn: bool) -> tuple[torch.Tensor, ModelState]:
    logits, state = model(torch.tensor([[token]], device=DEVICE), state, learn=learn)
    return logits[:, -1], state


@pytest.mark.parametrize(
    ("case", "learn"), [*((case, True) for case in CASES), ("mac", False), ("mac-fixed", False), ("mal", False)]
)
def test_every_row_goes_its_own_way(case, learn):
    """Rows stand at other places of their chunks and segments, come and go, and sit in slots that others left."""
    model = make(case)
    slots = make_slots(model, learn)
    draw = ids_from(0)
    plan = [*[[0]] * 2, *[[0, 1, 2]] * 4, *[[0, 2, 1, 3, 4]] * 5, *[[4, 1]] * 3, *[[4, 5, 1]] * 7]
    alone = {number: read(model, 3 * number, number) for number in range(6)}
    here: dict[int, ModelState | Seat] = dict(alone)
    for present in plan:
        tokens = [next(draw) for _ in present]
        logits, seats = slots.step(tokens, [here[number] for number in present])
        for number, token, seen, seat in zip(present, tokens, logits, seats, strict=True):
            expected, alone[number] = one(model, token, alone[number], learn)
            assert_close([seen], [expected], RTOL)
            here[number] = seat
    for number, state in here.items():
        found = state if isinstance(state, ModelState) else state.alone()
        assert_same_state(found, alone[number], RTOL)


@pytest.mark.parametrize("case", ["mac", "mag"])
def test_a_state_that_was_taken_out_is_a_value(case):
    model = make(case)
    slots = make_slots(model)
    (_,), (seat,) = slots.step([1], [read(model, 5, 0)])
    kept = seat.alone()
    before = kept.clone()
    seats = [seat]
    for token in range(9):
        _, seats = slots.step([token], seats)
    assert same_tensors(kept, before)
    expected, _ = one(model, 7, before, True)
    for state in (kept, seat):  # also as a state to go on from
        (found,), _ = slots.step([7], [state])
        assert_close([found], [expected], RTOL)
    _, (old,) = slots.step([1], [before])
    slots.step([2], [old])
    with pytest.raises(RuntimeError, match="gone on"):
        old.alone()


def same_tensors(a: ModelState, b: ModelState) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))


def test_who_is_not_called_keeps_its_state():
    model = make("mac")
    slots = make_slots(model)
    _, (first, second) = slots.step([1, 2], [read(model, 4, 0), read(model, 9, 1)])
    expected = [seat.slots.take(seat) for seat in (first, second)]
    slots.step([3, 4], [read(model, 2, 2), read(model, 3, 3)])
    assert same_tensors(first.alone(), expected[0])
    assert same_tensors(second.alone(), expected[1])


@pytest.mark.parametrize(
    ("case", "changes", "why"),
    [
        ("attention", {}, "changes its form"),
        ("rmt", {}, "changes its form"),
        ("lmm", {"memory": {"chunk_len": 1, "num_heads": 2}}, "end with every token"),
        ("lmm", {"memory": {"chunk_len": 4, "num_heads": 2, "gate_shape": "channel"}}, "gates per channel"),
    ],
)
def test_models_that_have_no_fixed_step_are_refused(case, changes, why):
    with pytest.raises(RuntimeError, match=why):
        Slots(small_model(case, **changes).eval())


def test_what_cannot_be_captured_decodes_without():
    """The sessions that were in slots go on."""

    class Broken(Again):
        def __init__(self, *given):
            raise RuntimeError("no such thing")

    engine, plain = byte_engine("mac", graphs=True, batching="stacked"), byte_engine("mac")
    session = engine.session()
    begun = session.generate("abc", 3, temperature=0, stop_ids=()).ids
    assert engine.graphs
    engine._slots[True]._capture = Broken
    engine._slots[True]._borders.clear()
    found = begun + session.generate((), 9, temperature=0, stop_ids=()).ids
    assert not engine.graphs
    assert found == plain.session().generate("abc", 12, temperature=0, stop_ids=()).ids
    growing = byte_engine("attention", graphs=True)
    assert (
        growing.session().generate("abc", 2, seed=0).ids
        == byte_engine("attention").session().generate("abc", 2, seed=0).ids
    )
    assert not growing.graphs


@pytest.mark.parametrize(("case", "batching"), [("mac", "exact"), ("mac", "stacked"), ("mag", "stacked")])
def test_company_in_slots_changes_no_answer(case, batching):
    """Sessions join and leave, learn or not, wait for stop strings, and read between their answers."""
    engine, plain = (byte_engine(case, graphs=on, batching=batching, piece=4, most_rows=5) for on in (True, False))

    def talk(number: int, session: Session) -> list[tuple[int, ...]]:
        policy = "frozen" if number % 4 == 3 else "learning"
        how = dict(policy=policy, seed=number, temperature=0.7, stop=["zq", "\n\n"])
        session.append("before " * (1 + number % 3))
        return [session.generate(f"{number}: ", 4 + 2 * number, **how).ids, session.generate("more", 5, **how).ids]

    sessions = [engine.session() for _ in range(6)]
    with ThreadPoolExecutor(len(sessions)) as pool:
        together = list(pool.map(talk, range(len(sessions)), sessions))
    assert engine.graphs
    for number, session in enumerate(sessions):
        alone = plain.session()
        assert talk(number, alone) == together[number]
        if batching == "exact" and not GPU:
            assert same(alone.past, session.past)
        else:
            assert_same_state(session.past.model, alone.past.model, 1e-3)


def test_stop_strings_go_back_to_the_state_before_them():
    model = small_model("mac", dtype=torch.float32, vocab_size=128).eval().requires_grad_(False)  # ASCII alone
    engine, plain = (Engine(model, ByteTokenizer(), graphs=on) for on in (True, False))
    whole = plain.session().generate("abc", 30, seed=5, stop_ids=()).ids
    place = next(i for i in range(2, 28) if whole[i] not in whole[:i])
    stop = bytes(whole[place : place + 3]).decode()
    answers = []
    for each in (engine, plain):
        session = each.session()
        first = session.generate("abc", 30, seed=5, stop=[stop], stop_ids=())
        assert (first.finish, len(first.tokens), len(first.ids)) == ("stop", place, place + 3)
        answers.append((first.ids, session.generate("then", 8, temperature=0, stop_ids=()).ids))
    assert answers[0] == answers[1]


@pytest.mark.skipif(machine() is not None, reason=str(machine()))
def test_the_step_kernel_writes_into_slots():
    memory = {"chunk_len": 16, "num_heads": 2, "expansion": 2}
    model = small_model("lmm", 1, torch.float32, memory=memory, num_persistent=0).to(DEVICE).requires_grad_(False)
    slots = Slots(model)
    states = [read(model, 13, 0), read(model, 2, 1)]
    seats: list[Seat | ModelState] = list(states)
    with backend(memory="triton"):
        for token in range(5):
            logits, found = slots.step([token, token + 1], seats)
            seats = list(found)
    for number in range(2):
        for token in range(number, 5 + number):
            expected, states[number] = one(model, token, states[number], True)
        assert_close([logits[number]], [expected], 1e-4)
        assert_same_state(found[number].alone(), states[number], 1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("branches", [1, 2])
def test_pieces_of_a_text_are_read_as_without_a_graph(case, branches):
    model = make(case, segment_len=8)
    reader, piece = Pieces(model, capture=Graph if GPU else Blind, branches=branches), 16  # more than a window
    texts = torch.randint(0, 39, (2, 5, 1, piece), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    states, expected = [model.start(1)] * 2, [model.start(1)] * 2
    held = []
    for pieces in texts.unbind(1):
        for row, ids in enumerate(pieces):
            held.append((states[row], expected[row]))
            states[row] = reader.read(ids, states[row])
            with torch.no_grad():
                expected[row] = model(ids, expected[row])[1]
    assert reader._graph is not None
    for state, right in (*held, *zip(states, expected, strict=True)):  # older ones too: states are values
        assert_same_state(state, right)


def test_a_state_that_stands_within_a_chunk_is_read_without_the_graph():
    model = make("mac", segment_len=8)
    reader = Pieces(model, capture=Graph if GPU else Blind)
    ids = torch.randint(0, 39, (1, 16), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    state = reader.read(ids, reader.read(ids, model.start(1)))
    assert reader._graph is not None
    with torch.no_grad():
        _, within = model(ids[:, :5], state)
        assert_same_state(reader.read(ids, within), model(ids, within)[1])


def test_a_graph_is_made_where_chunks_and_segments_end_though_the_first_piece_ended_elsewhere():
    model = make("mac", segment_len=8)
    ids = torch.randint(0, 39, (1, 16), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with torch.no_grad():
        _, within = model(ids[:, :5], model.start(1))
    reader = Pieces(model, capture=Graph if GPU else Blind)
    reader.read(ids, reader.read(ids, within))
    assert reader._graph is None
    reader.read(ids, reader.read(ids, model.start(1)))
    assert reader._graph is not None


def test_an_engine_with_graphs_reads_long_texts_as_one_without():
    text = "The quick brown fox jumps over the lazy dog. " * 9
    pasts = []
    for graphs in (False, True):
        with byte_engine("mac", graphs=graphs, piece=48) as engine:
            session = engine.session()
            session.append(text)
            session.append(text, policy="frozen")
            pasts.append(session.past)
    assert same(*pasts)


def test_buffers_of_a_graph_stay_where_they_are():
    model = byte_model("mac").to(DEVICE)
    slots = make_slots(model)
    _, seats = slots.step([1, 2], [model.start(1), model.start(1)])
    before = [x.data_ptr() for _, x in slots.state.tensors()]
    for token in range(14):
        _, seats = slots.step([token, token], seats)
    assert [x.data_ptr() for _, x in slots.state.tensors()] == before
