"""Traces: what a session tells of a text, as columns."""

from __future__ import annotations

import json

import pytest

from small import byte_engine
from titanmem.infer import Trace, traces
from titanmem.infer.inspect import surprises
from titanmem.infer.trace import FIELDS


@pytest.fixture(scope="module", params=["mag", "attention"])
def engine(request):
    with byte_engine(request.param, piece=12) as found:
        yield found


def test_columns_say_what_rows_say(engine):
    past, ids = engine.start, list(range(30, 65))
    rows, trace = surprises(engine, past, ids), Trace.join(list(traces(engine, past, ids)))
    assert [row.id for row in rows] == trace.ids == ids
    assert [row.nll for row in rows] == trace.nll
    assert trace.nll[0] is None
    for name in FIELDS:
        for i, column in enumerate(trace.fields[name]):
            assert column == [getattr(row.layers[i], name) for row in rows]
    assert trace.layers == [layer.layer for layer in rows[0].layers]


def test_pieces_follow_each_other_and_end_where_pieces_of_the_engine_end(engine):
    session = engine.session()
    session.append("0123456")
    parts = list(traces(engine, session.past, [65] * 30))
    assert [(part.start, len(part)) for part in parts] == [(7, 5), (12, 12), (24, 12), (36, 1)]
    assert parts[0].nll[0] is not None


def test_a_drawn_token_that_is_read_only_now_is_not_told_again(engine):
    session = engine.session()
    session.generate("abc", max_new_tokens=2, temperature=0, stop_ids=())
    assert session.past.unread
    (part,) = traces(engine, session.past, [66, 67])
    assert (part.start, part.ids) == (5, [66, 67])


def test_texts_join_to_the_text_and_half_characters_have_none(engine):
    ids = engine.words().encode("a😀é")
    (trace,) = traces(engine, engine.start, ids)
    assert trace.texts == ["a", "", "", "", "😀", "", "é"]
    (cut,) = traces(engine, engine.start, ids[:3])
    assert "".join(cut.texts) == "a�"


def test_the_last_turn_is_what_the_session_traces(engine):
    session = engine.session()
    session.append("before")
    assert Trace.join([]) == Trace(0, [], [], [], [], {name: [] for name in FIELDS})
    session.append("now", policy="frozen")
    trace = session.trace
    assert (trace.start, trace.texts) == (6, ["n", "o", "w"])
    assert all(x == 0 for row in trace.fields["change"] for x in row)


def test_json_has_numbers_or_null(engine):
    trace = Trace(0, [0], [1, 2], ["a", "b"], [None, float("inf")], {name: [[1 / 3, float("nan")]] for name in FIELDS})
    told = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert told["nll"] == [None, None]
    assert told["fields"]["loss"] == [[0.33333, None]]
