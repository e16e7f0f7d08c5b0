"""Sessions on the disk: what they were, bit for bit, whoever opens them, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from small import byte_engine, byte_model, same
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Conflict, Engine, Quota, QuotaExceeded, SessionBusy, Store
from titanmem.infer import snapshot as snapshots
from titanmem.infer.store import NameTaken, UnknownSession
from titanmem.infer.tokenlog import NotWritten


def talk(session, turns: range) -> None:
    """Turns of all kinds: texts, answers, frozen ones, answers that end at a stop string, and one that is cut short."""
    for turn in turns:
        kind = turn % 5
        if kind == 0:
            session.append(f"text number {turn}, longer than a piece")
        elif kind == 1:
            session.generate(" go on", 7, seed=turn, stop_ids=())
        elif kind == 2:
            session.append("frozen", policy="frozen")
        elif kind == 3:
            session.generate(max_new_tokens=40, seed=turn, stop=["e", "a", "\n", "t"], stop_ids=())
        else:
            pieces = session.stream("one", 6, seed=turn, stop_ids=())
            next(pieces)
            for _ in pieces:
                pass


@pytest.mark.parametrize("case", ["mac", "mac-fixed", "mag", "hybrid"])
def test_a_session_goes_on_as_if_it_had_never_stopped(case, tmp_path):
    engine = byte_engine(case, piece=12)
    whole = engine.session()
    talk(whole, range(10))
    for seconds in (0.0, 1e9):  # snapshots after every turn, and none at all: everything by the log
        store = Store(tmp_path / str(seconds), engine, snapshot_seconds=seconds)
        store.create("a").close()
        for first in range(0, 10, 2):
            session = store.open("a")
            talk(session, range(first, first + 2))
            session.close(save=first == 4)  # not saved: as if the process had died
        again = Store(tmp_path / str(seconds), byte_engine(case, piece=7)).open("a")
        assert same(again.past, whole.past)
        assert again.fork().generate("x", 5, seed=1).ids == whole.fork().generate("x", 5, seed=1).ids


def test_a_torn_record_is_cut_off_and_a_damaged_one_is_refused(tmp_path):
    engine = byte_engine()
    store = Store(tmp_path, engine, snapshot_seconds=1e9)
    session = store.create("a")
    session.append("first")
    session.append("second")
    past, path = session.past, session._folder.log.path
    session.close(save=False)
    data = path.read_bytes()
    path.write_bytes(data + data[16:30])
    session = store.open("a")
    assert same(session.past, past)
    assert path.read_bytes() == data
    session.close(save=False)
    broken = bytearray(data)
    broken[34] ^= 1
    path.write_bytes(bytes(broken))
    with pytest.raises(ValueError, match="damaged at byte 16, with 0 tokens before it"):
        store.open("a")
    path.write_bytes(data)
    store.open("a").close()  # the refusal left no lock behind


def test_a_damaged_snapshot_is_made_good_by_the_one_before(tmp_path):
    store = Store(tmp_path, byte_engine(), snapshot_seconds=1e9)
    session = store.create("a")
    for text in ("one", "two", "three"):
        session.append(text)
        session.save()
    session.append("four")
    past, folder = session.past, session._folder
    session.close(save=False)
    newest = folder.path / folder.manifest.bases[-1].state
    newest.write_bytes(newest.read_bytes()[:-50])
    assert same(store.open("a").past, past)
    assert len(list(folder.path.glob("*.safetensors"))) == 2


def test_states_of_other_models_and_newer_formats_are_refused(tmp_path):
    engine = byte_engine("lmm")
    store = Store(tmp_path, engine)
    with store.create("a") as session:
        session.append("abc")
        store.export(session, tmp_path / "out" / "a.session")
    other = byte_model("lmm")
    with torch.no_grad():
        other.embedding.weight.add_(1)
    cases = [
        (Engine(other, ByteTokenizer()), "the same config with other weights"),
        (Engine(byte_model("lmm", window_len=9), ByteTokenizer()), "a model of another config"),
    ]
    for wrong, text in cases:
        with pytest.raises(ValueError, match=text):
            Store(tmp_path, wrong).open("a")
        with pytest.raises(ValueError, match=text):
            Store(tmp_path / "new", wrong).import_file(tmp_path / "out" / "a.session")
    manifest = next(tmp_path.glob("*/session.json"))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match=r"session format 99, this titanmem reads up to 1"):
        store.open("a")


def test_forgetting_returns_to_a_mark_and_leaves_nothing_on_the_disk(tmp_path):
    store = Store(tmp_path, byte_engine(), snapshot_seconds=1e9)
    session = store.create("a")
    session.append("kept ")
    session.mark("here")
    past = session.past
    session.append("SECRET")
    session.mark("later")
    session.generate("SECRET", 5, seed=0)
    session.forget_since("here")
    assert same(session.past, past)
    assert list(session.marks) == ["here"]
    secret = torch.tensor(list(b"SECRET"), dtype=torch.int32).numpy().tobytes()
    assert not any(secret in file.read_bytes() for file in session._folder.path.iterdir())
    session.append("and on")
    session.forget_since(7)  # a place inside an append, by the log
    expected = byte_engine().session()
    expected.append("kept an")
    assert session.tokens == 7
    assert session.fork().generate("", 4, temperature=0).ids == expected.generate("", 4, temperature=0).ids
    session.close(save=False)
    session = store.open("a")
    assert session.tokens == 7
    with pytest.raises(ValueError, match="goes back to token 7, not to 2"):
        session.forget_since(2)
    session.reset()
    assert same(session.past, session.engine.start)
    assert session.marks == {}


def test_forks_share_files_and_nothing_else(tmp_path):
    store = Store(tmp_path, byte_engine(), snapshot_seconds=1e9)
    session = store.create("root")
    session.append("a long common past")
    session.save()
    session.append("not in the snapshot")
    fork = store.fork(session, "child")
    assert same(fork.past, session.past)
    fork.append("child")
    session.append("root")
    past = fork.past
    for one in (session, fork):
        one.close(save=False)
    assert (store.info("child").parent, store.info("child").forked_at) == ("root", 37)
    store.delete("root")
    assert same(store.open("child").past, past)
    assert store.info("child").parent is None
    assert [info.name for info in store.sessions()] == ["child"]


def test_a_session_is_open_once(tmp_path):
    byte_model().save(tmp_path / "model")
    engine = Engine.load(tmp_path / "model", device="cpu")
    store = Store(tmp_path / "store", engine)
    session = store.create("a")
    with pytest.raises(SessionBusy, match="in use by process"):
        store.open("a")
    with pytest.raises(SessionBusy):
        store.delete("a")
    code = (
        "import sys; from titanmem.infer import *; e = Engine.load(sys.argv[1], device='cpu')\n"
        "try: Store(sys.argv[2], e).open('a')\n"
        "except SessionBusy as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path / "store")]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the session is in use by process" in out.stdout
    session.close()
    store.open("a").close()


def test_owners_see_their_own(tmp_path):
    store = Store(tmp_path, byte_engine())
    with store.create("x", "ann") as hers, store.create("x", "bob") as his:
        hers.append("ann")
        his.append("bobby")
    assert [(i.owner, i.tokens) for i in store.sessions("ann")] == [("ann", 3)]
    for call in (store.open, store.info, store.delete):
        with pytest.raises(UnknownSession, match="there is no session 'x'"):
            call("x", "eve")
    store.delete("x", "ann")
    assert [i.owner for i in store.sessions(None)] == ["bob"]


def test_quotas_names_and_expiry(tmp_path):
    engine = byte_engine("lmm")
    store = Store(tmp_path, engine, quota=Quota(sessions=2, tokens=10))
    session = store.create("a")
    with pytest.raises(ValueError, match="may have 10 tokens; this one has 0, 11 more"):
        session.append("x" * 11)
    session.append("x" * 10)
    with pytest.raises(NameTaken, match="a session 'a' already"):
        store.create("a")
    for bad in ("../x", "a/b", ".x", "x" * 101):
        with pytest.raises(ValueError, match="name is up to 100 letters"):
            store.create(bad)
    store.create("b").close()
    with pytest.raises(QuotaExceeded, match="2 sessions of 2 allowed"):
        store.fork(session, "c")
    small = Store(tmp_path, engine, quota=Quota(bytes=10_000))
    with pytest.raises(QuotaExceeded, match="of 10,000 allowed"):
        small.create("d")
    with small.open("b") as other, pytest.raises(QuotaExceeded, match="of 10,000 allowed"):
        other.append("x")
    tight = Store(tmp_path, engine, quota=Quota(bytes=4 * engine.start.nbytes + 10))  # two snapshots for each
    with tight.open("b") as other:
        other.append("x", key="k")
        tight.quota = Quota(bytes=10)
        assert other.append("x", key="k") == 1  # it was read: whoever asks again hears so
        tight.quota = Quota(bytes=4 * engine.start.nbytes + 10)
        with pytest.raises(QuotaExceeded, match="more are needed"):
            other.mark("too much")
    with pytest.raises(QuotaExceeded, match=r"counts for [\d,]+ at least"):
        tight.create("c")
    assert store.expire(3600) == []
    assert store.expire(0) == ["b"]  # `a` is open
    assert len(list(tmp_path.glob("*/session.json"))) == 1


def test_an_append_can_expect_a_place(tmp_path):
    session = Store(tmp_path, byte_engine("lmm")).create("a")
    session.append("abc", expect=0)
    with pytest.raises(Conflict, match="has 3 tokens, the request expected 0"):
        session.append("abc", expect=0)
    assert session.tokens == 3


def test_a_text_with_a_key_is_read_once(tmp_path):
    with byte_engine() as engine:
        store = Store(tmp_path, engine)
        with store.open("a", create=True) as session, store.open("b", create=True) as plain:
            for text in ("first ", "second ", "third "):
                plain.append(text)
            assert session.append("first ", key="1") == session.append("first ", expect=0, key="1") == 6
            session.append("second ", key="2")
            session.save()
            session.append("third ", key="3")
            assert same(session.past, plain.past)
            with pytest.raises(Conflict, match="'3' was used with another text, of 6 tokens; this one has 7"):
                session.append("another", key="3")
            for key in ("1", "3"):
                with pytest.raises(Conflict, match=f"'{key}' was used with another text, of 6 tokens; this one has 6"):
                    session.append("other ", key=key)
        with store.open("a") as session:  # another process: keys before and behind the snapshot are known
            for key, text in (("2", "second "), ("3", "third ")):
                session.append(text, key=key)
                with pytest.raises(Conflict, match="was used with another text"):
                    session.append(text.upper(), key=key)
            assert session.tokens == 19
            session.forget_since(13)
            session.append("third ", key="3")
            assert session.tokens == 19


@pytest.mark.parametrize("bits", [0, 8])
def test_one_file_carries_a_session(bits, tmp_path):
    engine = byte_engine("mac")
    store = Store(tmp_path / "one", engine)
    session = store.create("a", policy="frozen")
    session.append("something to keep, with some more text", policy="learning")
    session.generate(" and", 5, seed=0)
    about = store.export(session, tmp_path / "a.session", bits)
    other = Store(tmp_path / "two", engine).import_file(tmp_path / "a.session", "b")
    assert (other.policy, other.tokens, other.name) == ("frozen", session.tokens, "b")
    if bits:
        assert 0 < about["loss"] < 0.02
        assert snapshots.relative_error(session.past, other.past) == pytest.approx(about["loss"])
    else:
        assert same(other.past, session.past)


def test_files_that_are_no_state_of_the_model_are_refused(tmp_path):
    engine = byte_engine("lmm", graphs=True)
    store = Store(tmp_path / "store", engine)
    session = engine.session()
    session.append("abcde")
    past = session.past
    fast = past.model.blocks[0].fast
    bad = [
        replace(fast, start_weight=tuple(w[:, :, :-1] for w in fast.start_weight)),
        replace(fast, pending=replace(fast.pending, offset=torch.tensor([1000]))),
        replace(fast, pending=replace(fast.pending, offset=torch.tensor([3]))),  # other than the next layer's
        replace(fast, pending=(1, 2)),
        replace(fast, start_weight=tuple(w / 0 for w in fast.start_weight)),
    ]
    others = [replace(past.model.blocks[0], fast=wrong) for wrong in bad] + [replace(past.model.blocks[0], held=3)]
    models = [replace(past.model, blocks=(block, *past.model.blocks[1:])) for block in others]
    models += [replace(past.model, blocks=()), past]
    pasts = [replace(past, model=model) for model in models]
    pasts += [replace(past, tokens=2**70), replace(past, unread=(1.5,)), replace(past, answered="no")]
    for number, wrong in enumerate(pasts):
        path = tmp_path / f"{number}.session"
        snapshots.write(path, wrong, engine.identity)
        with pytest.raises(ValueError, match="is no state of this model"):
            store.import_file(path)
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    with pytest.raises(ValueError, match="not a readable state file"):
        store.import_file(tmp_path / "noise")
    save_file({"x": torch.zeros(1)}, tmp_path / "tree", {"format": "titanmem.state", "version": "1", "tree": "[3]"})
    with pytest.raises(ValueError, match="does not describe a state"):
        store.import_file(tmp_path / "tree")
    with pytest.raises(ValueError, match="is no file"):
        store.import_file(tmp_path)
    assert store.sessions() == []
    assert engine.graphs  # a bad file costs nobody anything
    session.append("still works")


def test_what_cannot_be_written_leaves_the_session_as_it_was(tmp_path, monkeypatch):
    store = Store(tmp_path, byte_engine(), snapshot_seconds=1e9)
    session = store.create("a")
    session.append("kept")
    past, path = session.past, session._folder.log.path
    data = path.read_bytes()
    write = os.write

    def full(file: int, block: bytes) -> int:
        return write(file, block[: len(block) // 2])

    for call in (lambda: session.append("lost"), lambda: session.generate("lost", 5, seed=0)):
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with pytest.raises(ValueError, match=r"the disk is full; nothing of this was kept"):
                call()
        assert session.past is past
        assert path.read_bytes() == data
    session.generate("kept too", 5, seed=0)
    with monkeypatch.context() as patch:  # a snapshot that fails costs nothing: the log has everything
        patch.setattr("titanmem.infer.snapshot.write", lambda *_, **__: (_ for _ in ()).throw(OSError("no room")))
        session._snapshot_seconds = 0.0
        with pytest.warns(UserWarning, match="goes on without a new snapshot: .*no room"):
            session.append("and this")
        past = session.past
        with pytest.warns(UserWarning, match="goes on without a new snapshot: .*no room"):
            session.close()
    assert same(store.open("a").past, past)


def test_a_disk_that_is_full_ends_neither_closing_nor_deleting(tmp_path, monkeypatch):
    store = Store(tmp_path, byte_engine("lmm"), snapshot_seconds=0.0)
    session = store.create("a")

    def full(*_, **__):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.warns(UserWarning, match="goes on without a new snapshot: .*No space left"):
            assert session.append("kept") == 4
        for call in (session.save, session.mark):
            with pytest.raises(NotWritten, match="No space left"):
                call()
        with pytest.warns(UserWarning, match="without a new snapshot"):
            session.close()
    with store.open("a") as session:
        assert session.tokens == 4
    forget, tries = store._forget_row, []

    def once(id: str) -> None:
        tries.append(id)
        if len(tries) == 1:
            raise NotWritten("database or disk is full")
        forget(id)

    monkeypatch.setattr(store, "_forget_row", once)
    store.delete("a")
    assert store.sessions() == []
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_new_store_can_be_opened_by_many_at_once(tmp_path):
    def work(number):
        with Store(tmp_path / str(number // 8)):
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(160)))


def test_opening_while_others_delete_finds_a_session_or_none(tmp_path):
    with byte_engine("lmm") as engine:
        found = []

        def work(number: int) -> None:
            with Store(tmp_path, engine) as store:
                for turn in range(25):
                    try:
                        if (number + turn) % 3:
                            with store.open("a", create=True) as session:
                                session.append("x")
                            found.append(True)
                        else:
                            store.delete("a")
                    except (SessionBusy, UnknownSession):
                        continue

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        assert found
        with Store(tmp_path, engine) as store:
            known = {info.id for info in store.sessions()}
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == known


def test_marks_can_be_dropped(tmp_path):
    with byte_engine("lmm") as engine, Store(tmp_path, engine) as store:
        for session in (store.create("a"), engine.session()):
            session.append("abc")
            session.mark("one")
            session.append("def")
            session.drop_mark("one")
            assert session.marks == {}
            assert session.tokens == 6
            with pytest.raises(ValueError, match="there is no mark 'one'; known: none"):
                session.drop_mark("one")


@pytest.mark.parametrize("ids", [[1.7], ["1"], [None]])
def test_ids_are_whole_numbers(ids):
    with pytest.raises(ValueError, match="ids are whole numbers"):
        byte_engine("lmm").session().append(ids)


def test_a_damaged_database_is_named(tmp_path):
    (tmp_path / "sessions.sqlite").write_bytes(b"noise" * 2000)
    with pytest.raises(ValueError, match=r"sessions\.sqlite cannot be read"):
        Store(tmp_path)


def test_processes_that_start_together_share_a_store(tmp_path):
    code = "import sys; from titanmem.infer import Store; Store(sys.argv[1]).sessions(); print('fine')"
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate()[0] for child in children] == ["fine\n"] * 4
