"""The engine gives every session what it would get alone."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from small import byte_engine, same
from support import BLOCK_CASES, assert_same_state, small_model
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.graphs import AUTO, wanted_branches
from titanmem.infer.answer import Answer
from titanmem.infer.engine import Engine
from titanmem.infer.past import cut, reading
from titanmem.infer.session import Session
from titanmem.models import wave
from titanmem.models.generation import stream

PROMPTS = ["To be, or not", "a", "one two three four five six seven", "xyz xyz", "\n\n", "memory", "12345", "the end"]


@pytest.mark.parametrize("case", BLOCK_CASES)
@pytest.mark.parametrize("how", [dict(temperature=0), dict(temperature=0.9, top_k=20, top_p=0.9, seed=3)])
def test_answers_are_those_of_generate(case, how):
    engine = byte_engine(case)
    prompt = torch.tensor([list(b"to be, or not to be")])
    expected = engine.model.generate(prompt, 14, repetition_penalty=1.2, **how)[0, prompt.shape[1] :].tolist()
    answer = engine.session().generate("to be, or not to be", 14, repetition_penalty=1.2, stop_ids=(), **how)
    assert list(answer.ids) == expected


def test_a_second_answer_goes_on_where_the_first_ended():
    engine = byte_engine("mag")
    session = engine.session()
    session.generate("hello", 6, temperature=0, stop_ids=())
    answer = session.generate(" and", 6, temperature=0, stop_ids=())
    *_, last = stream(engine.model, torch.tensor([list(b"hello")]), 6, temperature=0)
    more = torch.tensor([[int(last.ids), *b" and"]])
    expected = engine.model.generate(more, 6, temperature=0, state=last.state)
    assert list(answer.ids) == expected[0, 5:].tolist()


@pytest.mark.parametrize("batching", ["exact", "stacked"])
@pytest.mark.parametrize("case", ["mac", "hybrid"])
def test_company_changes_no_answer(batching, case):
    """Sessions join and leave the batch at different times, with prompts longer than a piece."""
    engine = byte_engine(case, batching=batching, piece=4, most_rows=5)
    ways = (dict(temperature=0.7), dict(temperature=0), dict(temperature=0.7, top_k=9, repetition_penalty=1.3))
    how = [dict(max_new_tokens=5 + 4 * i, seed=i, **ways[i % 3]) for i in range(len(PROMPTS))]
    sessions = [engine.session() for _ in PROMPTS]

    def talk(number: int, session: Session) -> tuple[int, ...]:
        session.append("before ")
        return session.generate(PROMPTS[number], **how[number]).ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(talk, range(len(PROMPTS)), sessions))
    assert batching == "exact" or engine.work.forwards < engine.work.drawn
    for number, session in enumerate(sessions):
        alone = byte_engine(case, piece=4).session()
        assert talk(number, alone) == together[number]
        if batching == "exact":
            assert same(alone.past, session.past)
        else:
            assert_same_state(session.past.model, alone.past.model, 1e-3)


@pytest.mark.parametrize("case", ["lmm", "mac"])
def test_thirty_two_sessions_at_random_places_answer_as_each_alone(case):
    """Sessions join and leave between steps, somewhere within their chunks and segments."""
    draw = random.Random(0)
    texts = [bytes(draw.choices(range(97, 123), k=draw.randint(1, 30))).decode() for _ in range(32)]
    lengths = [draw.randint(3, 30) for _ in texts]
    waits = [draw.random() * 0.1 for _ in texts]

    def talk(session: Session, number: int, wait: float = 0.0) -> Answer:
        session.append(texts[number])
        time.sleep(wait)
        return session.generate("", lengths[number], temperature=0, stop_ids=(), logprobs=256)

    engine = byte_engine(case, batching="stacked", most_rows=32)
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda n: talk(engine.session(), n, waits[n]), range(32)))
    assert engine.work.forwards < engine.work.drawn / 4
    single = byte_engine(case)
    for number, answer in enumerate(together):
        alone = talk(single.session(), number)
        assert answer.ids == alone.ids
        for one, other in zip(answer.tokens, alone.tokens, strict=True):
            found, expected = dict(one.likely), dict(other.likely)
            assert max(abs(found[i] - expected[i]) for i in expected) < 1e-4


def test_frozen_sessions_keep_their_memory():
    session = byte_engine("mag").session()
    session.append("learn this")
    weight = session.past.model.blocks[0].memory.weight[0]
    session.set_policy("frozen")
    session.generate("not this", 9, seed=0)
    assert torch.equal(session.past.model.blocks[0].memory.weight[0], weight)
    session.append("but this", policy="learning")
    assert not torch.equal(session.past.model.blocks[0].memory.weight[0], weight)


def test_a_fork_goes_its_own_way():
    session = byte_engine().session()
    session.append("the same past")
    fork = session.fork()
    before = session.past.clone()
    theirs = fork.generate(" and", 20, seed=1).ids
    assert same(session.past, before)
    assert session.generate(" and", 20, seed=1).ids == theirs
    assert same(session.past, fork.past)


def test_stop_strings_are_no_part_of_the_session():
    engine = byte_engine("lmm")
    plain = engine.session()
    whole = plain.generate("abc", 30, seed=5, stop_ids=()).tokens
    ids = [t.id for t in whole]
    place = next(i for i in range(2, 30) if ids[i - 1] < 128 and 32 < ids[i] < 127 and ids[i] not in ids[:i])
    stop = chr(ids[place])
    session, expected = engine.session(), engine.session()
    answer = session.generate("abc", 30, seed=5, stop=[stop], stop_ids=())
    assert answer.finish == "stop"
    assert [t.id for t in answer.tokens] == [t.id for t in whole[:place]]
    assert len(answer.ids) == place + 1
    assert stop not in answer.text
    expected.generate("abc", place, seed=5, stop_ids=())
    after = [s.generate("then", 8, temperature=0).ids for s in (session, expected)]
    assert after[0] == after[1]


def test_what_may_become_a_stop_string_is_held_back():
    from titanmem.data.tokenizer import ByteTokenizer
    from titanmem.infer.answer import Shown

    shown = Shown(ByteTokenizer(), ["\nUser:", "!!"])
    seen = [shown.push(byte) for byte in b"a\nUs\nUser"]
    assert [text for text, _ in seen] == ["a", "", "", "", "\nUs", "", "", "", ""]
    assert shown.released == 4
    assert shown.push(ord(":")) == ("", 4)
    other = Shown(ByteTokenizer(), ["é"])
    assert [other.push(byte) for byte in "aé".encode()] == [("a", None), ("", None), ("", 1)]


def test_cancelled_answers_belong_to_the_session():
    session = byte_engine().session()
    pieces = session.stream("abc", 1000, seed=0, stop_ids=())
    for _ in range(5):
        next(pieces)
    with pytest.raises(ValueError, match="still being drawn"):
        session.append("x")
    pieces.close()
    assert 8 <= session.tokens < 1000
    assert session.append("more") == 4


def test_a_failing_job_leaves_its_session_and_the_others_alone():
    engine = byte_engine()
    session = engine.session()
    session.append("abc")
    before = session.past
    with pytest.raises(ValueError, match="temperature must not be negative"):
        session.generate("x", temperature=-1)
    with pytest.raises(ValueError, match="ids must lie in"):
        session.append([300])
    assert session.past is before
    with pytest.raises(ValueError, match="nothing to go on from"):
        engine.session().generate(max_new_tokens=3)


def test_pieces_end_on_a_grid_however_tokens_arrive():
    assert cut(0, 10, 4) == [4, 4, 2]
    assert cut(3, 10, 4) == [1, 4, 4, 1]
    assert cut(4, 4, 4) == [4]
    assert cut(5, 1, 4) == [1]


@pytest.mark.parametrize("case", ["mag", "mal"])
def test_a_text_in_given_pieces_has_the_same_bits_with_every_engine(case, monkeypatch):
    """With a graph and without, and where the engine's own pieces are others. As on a GPU, pieces are cut in parts."""
    monkeypatch.setattr(wave, "pieces_of", lambda _, x: 4 if wanted_branches() == AUTO and x.shape[1] % 64 == 0 else 1)
    memory = {"chunk_len": 16, "num_heads": 2, "expansion": 2}
    model = small_model(case, dtype=torch.float32, vocab_size=300, dim=64, mlp_width=128, memory=memory).eval()
    pasts = []
    for how in ({"graphs": True}, {"graphs": True, "piece": 256}, {"graphs": False}):
        with Engine(
            model.requires_grad_(False), ByteTokenizer(), **{"piece": 512, "batching": "exact"} | how
        ) as engine:
            text = reading(engine.start, [37 * i % 250 for i in range(1600)], 512)
            pasts.append([x for _, x in engine.submit(text).result().model.tensors()])
    for others in pasts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(pasts[0], others, strict=True))


def test_logprobs_are_those_of_the_model():
    engine = byte_engine("lmm")
    answer = engine.session().generate("abc", 6, temperature=0, logprobs=3, stop_ids=())
    logits, _ = engine.model(torch.tensor([[*b"abc", *answer.ids]]))
    chance = logits[0].log_softmax(-1)
    for place, token in enumerate(answer.tokens):
        assert token.logprob == pytest.approx(float(chance[2 + place, token.id]), abs=1e-4)
        assert token.likely[0][0] == token.id
        assert len(token.likely) == 3


def test_surprise_is_the_probe_of_the_last_turn():
    engine = byte_engine("mag")
    session = engine.session()
    session.append("some text before")
    _, state = engine.model(torch.tensor([list(b"some text before")]))
    session.append(" and now")
    logits, _, probes = engine.model(torch.tensor([list(b" and now")]), state, probe=True)
    seen = session.surprise
    assert [s.text for s in seen] == list(" and now")
    norm = probes[1].surprise[0].square().sum((-1, -2)).sqrt()
    assert [s.layers[1].surprise for s in seen] == pytest.approx(norm.tolist(), rel=1e-4)
    assert seen[3].nll == pytest.approx(-float(logits[0, 2].log_softmax(-1)[ord("d")]), rel=1e-4)


def test_a_session_whose_logits_are_not_finite_harms_no_other():
    engine = byte_engine("lmm", batching="stacked")
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        session.append("abc")
    sick = sessions[1].past
    spoilt = sick.model.map(lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x)
    sessions[1] = Session(engine, replace(sick, model=spoilt))
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(session.generate, "d", 6, temperature=1.0, seed=2, stop_ids=()) for session in sessions]
        with pytest.raises(ValueError, match="logits are not finite"):
            futures[1].result()
        assert futures[0].result().ids == futures[2].result().ids
