"""Preparing: the same bytes whatever the number of processes and however often it was killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from time import sleep

import pytest
from corpus import all_documents, all_files, write_files, write_lines

from titanmem.data import encode
from titanmem.data.journal import Journal
from titanmem.data.prepare import check_origin, locked, prepare
from titanmem.data.shards import Settings, TokenShards
from titanmem.data.sources import is_held_out
from titanmem.data.tokenizer import load_tokenizer

SETTINGS = {"held_out": 0.2, "shard_tokens": 1500, "workers": 1, "progress": False}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder of files that makes about a dozen groups."""
    monkeypatch.setattr(encode, "GROUP_BYTES", 800)
    return str(write_files(tmp_path / "source"))


@pytest.fixture
def expected(source, tmp_path):
    """The files of an undisturbed run."""
    prepare(source, tmp_path / "expected", **SETTINGS)
    return all_files(tmp_path / "expected")


def test_every_document_is_in_one_split_and_ends_with_the_end(source, tmp_path):
    prepare(source, tmp_path / "out", **SETTINGS)
    texts = {p.relative_to(source).as_posix(): p.read_text() for p in Path(source).rglob("*.txt")}
    for split in ("train", "held"):
        shards = TokenShards(tmp_path / "out", split)
        mine = [n for n in sorted(texts) if texts[n] and is_held_out(n, texts[n], 0.2) == (split == "held")]
        assert [bytes(d).decode() for d in all_documents(shards)] == [texts[n] + "\0" for n in mine]
        assert shards.documents == len(mine)
        assert all(s.tokens <= 1500 for s in shards.shards)
        assert len(shards.shards) > 1


@pytest.mark.parametrize("limit", [None, 5000])
def test_two_worker_counts_write_identical_shards(source, tmp_path, limit):
    for workers in (1, 2):
        prepare(source, tmp_path / str(workers), limit_tokens=limit, **SETTINGS | {"workers": workers})
    one, two = all_files(tmp_path / "1"), all_files(tmp_path / "2")
    assert one == two
    assert {"dataset.json", "parts.json", "tokenizer/tokenizer_bytes.json", "train-00000.safetensors"} <= set(one)


@pytest.mark.parametrize("limits", [{"limit_documents": 11}, {"limit_tokens": 2000}])
def test_limits_take_the_first_documents(source, tmp_path, limits):
    settings = SETTINGS | {"held_out": 0}
    whole = all_documents(prepare(source, tmp_path / "whole", **settings))
    some = all_documents(prepare(source, tmp_path / "some", **limits, **settings))
    assert some == whole[: len(some)]
    if "limit_documents" in limits:
        assert len(some) == 11
    else:
        assert sum(map(len, some)) <= 2000 < sum(map(len, whole[: len(some) + 1]))


KILLED = """
import os, signal, sys
from titanmem.data import encode, journal
from titanmem.data.journal import Journal
from titanmem.data.prepare import prepare
encode.GROUP_BYTES = 800
add = journal.Journal.add
def killed(self, entry):
    add(self, entry)
    if len(self.notes) == 4:
        self.path.open("ab").write(b'{"group": 4, "li')  # half a line, as a kill may leave it
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.add = killed
prepare(sys.argv[1], sys.argv[2], held_out=0.2, shard_tokens=1500, workers=1, progress=False)
"""


def test_a_killed_preparation_resumes_to_the_same_files(source, expected, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run = subprocess.run([sys.executable, "-c", KILLED, source, str(out)], check=False)
    assert run.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"no dataset\.json"):
        TokenShards(out)
    done, whole = [], encode.Encoder.encode
    monkeypatch.setattr(
        encode.Encoder, "encode", lambda self, group, limit: done.append(group) or whole(self, group, limit)
    )
    prepare(source, out, **SETTINGS)
    assert done[0] == 4
    assert len(done) == len(set(done))
    assert all_files(out) == expected


def test_a_torn_line_of_the_journal_is_dropped(tmp_path):
    path, settings = tmp_path / "journal.jsonl", Settings("source")
    notes = [encode.Note(group, encode.Limit(), False, (encode.Piece("train", 5, 1),)) for group in range(2)]
    Journal(path, settings, "plan").add(notes[0])
    with path.open("ab") as file:
        file.write(b'{"group": 1, "li')
    Journal(path, settings, "plan").add(notes[1])
    assert Journal(path, settings, "plan").notes == dict(enumerate(notes))


def test_stopped_at_any_file_it_goes_on_to_the_same_files(source, expected, tmp_path, monkeypatch):
    out, replace, stops = tmp_path / "out", os.replace, 0
    while not (out / "dataset.json").exists():
        room = [3]  # files that can be written before the disk is full

        def full(a, b, room=room):
            room[0] -= 1
            if room[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(a, b)

        monkeypatch.setattr(os, "replace", full)
        try:
            prepare(source, out, **SETTINGS)
        except ValueError as error:
            stops += 1
            assert "No space left on device" in str(error)  # noqa: PT017
            assert str(out) in str(error)  # noqa: PT017
    assert stops > 5
    assert all_files(out) == expected


def test_finished_is_finished_and_other_settings_are_refused(source, expected, tmp_path, capsys):
    out = tmp_path / "expected"
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    prepare(source, out, **SETTINGS | {"progress": True})
    assert "already prepared" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with pytest.raises(ValueError, match=r"held_out: 0\.2 there, 0\.1 now; limit_tokens: None there, 9 now"):
        prepare(source, out, **SETTINGS | {"held_out": 0.1, "limit_tokens": 9})


def test_lost_and_damaged_shards_alone_are_made_again(source, expected, tmp_path):
    out = tmp_path / "expected"
    (out / "train-00001.safetensors").unlink()
    os.truncate(out / "held-00000.safetensors", 300)
    kept = (out / "train-00000.safetensors").stat().st_mtime_ns
    prepare(source, out, **SETTINGS)
    assert all_files(out) == expected
    assert (out / "train-00000.safetensors").stat().st_mtime_ns == kept


def test_shards_are_not_made_again_from_a_changed_source(source, expected, tmp_path):
    out, shard = tmp_path / "expected", tmp_path / "expected" / "train-00000.safetensors"
    shard.unlink()
    (out / "source.json").unlink()  # as earlier versions left it
    changed = next(p for p in sorted(Path(source).rglob("*.txt")) if not is_held_out(f"0/{p.name}", "", 0.2))
    size = changed.stat().st_size
    changed.write_text("x" * size)  # even when its size stays
    with pytest.raises(ValueError, match=r"changed since .*expected was prepared"):
        prepare(source, out, **SETTINGS)
    assert not shard.exists()
    shutil.rmtree(out / "unfinished")
    for path in sorted(Path(source).rglob("*.txt"))[5:]:
        path.unlink()
    with pytest.raises(ValueError, match=r"changed since .*expected was prepared"):
        prepare(source, out, **SETTINGS)


def test_files_that_changed_since_are_named_and_not_passed_over(source, expected, tmp_path):
    out, files = tmp_path / "expected", sorted(Path(source).rglob("*.txt"))
    for path in files:
        os.utime(path, (1, 1))  # that alone is no change
    for look in (lambda: prepare(source, out, **SETTINGS), lambda: check_origin(out)):
        look()
        (Path(source) / "new.md").write_text("new")
        old = files[0].read_bytes(), files[1].read_bytes()
        files[0].unlink()
        files[1].write_bytes(b"?" + old[1][1:])  # of the same size
        with pytest.raises(ValueError, match=r"new: new\.md; gone: 0/000\.txt; changed: 0/003\.txt\).*delete"):
            look()
        (Path(source) / "new.md").unlink()
        files[0].write_bytes(old[0])
        files[1].write_bytes(old[1])
        look()


def test_what_was_prepared_stays_of_use_without_its_source_and_without_its_mark(source, expected, tmp_path):
    out, other = tmp_path / "expected", tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("another folder")
    with pytest.raises(ValueError, match=r"other is not what .* was prepared from, .*source \(new: a\.txt; gone: "):
        check_origin(out, str(other))
    os.rename(source, tmp_path / "away")
    prepare(source, out, **SETTINGS)
    check_origin(out)
    check_origin(out, str(tmp_path / "away"))  # the same files
    Path(source).mkdir()  # where a disk was mounted
    check_origin(out)
    (out / "source.json").unlink()
    check_origin(out, str(other))


def test_a_preparation_goes_on_with_the_files_it_began_with(source, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encode.Encoder, "encode", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, **SETTINGS)
    path = sorted(Path(source).rglob("*.txt"))[0]
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(ValueError, match=r"changed since .*unfinished was begun \(changed: 0/000\.txt\)"):
        prepare(source, out, **SETTINGS)


def write_texts(folder: Path, count: int) -> str:
    """A folder of text files of which a share of 0.05 holds none out."""
    folder.mkdir()
    for number in range(count):
        assert not is_held_out(f"d{number}.txt", "", 0.05)
        (folder / f"d{number}.txt").write_text(f"the document {number}")
    return str(folder)


@pytest.mark.parametrize("count", [1, 2, 15])
def test_of_few_files_one_is_held_out_the_same_when_it_is_made_again(count, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "GROUP_BYTES", 30)
    text, out = write_texts(tmp_path / "text", count), tmp_path / "out"
    index = prepare(text, out, workers=1, progress=False).index
    assert sum(s.documents for s in index.splits["held"]) == (count > 1)
    before = all_files(out)
    for file in out.glob("*.safetensors"):
        file.unlink()
    prepare(text, out, workers=1, progress=False)
    assert all_files(out) == before


def test_where_the_share_takes_some_files_no_other_is_held_out(tmp_path):
    text, names = write_texts(tmp_path / "text", 15), [f"d{number}.txt" for number in range(15)]
    held = prepare(text, tmp_path / "out", held_out=0.3, workers=1, progress=False).index.splits["held"]
    assert sum(s.documents for s in held) == sum(is_held_out(name, "", 0.3) for name in names) > 1
    limited = prepare(text, tmp_path / "limited", limit_documents=1, workers=1, progress=False).index
    assert not limited.splits["held"]
    assert "it has 1 document, of which held_out=0.05 took none; for some, cut it" in limited.why_none_held("x")


def test_a_trained_tokenizer_is_saved_with_the_shards(source, tmp_path):
    pytest.importorskip("tokenizers", reason="training needs the package tokenizers")
    shards = prepare(source, tmp_path / "out", tokenizer="bpe", vocab_size=300, **SETTINGS)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert (shards.vocab_size, shards.end) == (tokenizer.vocab_size, tokenizer.end)
    assert shards.index.dtype == "uint16"
    first = next(p for p in sorted(Path(source).rglob("*.txt")) if not is_held_out(f"0/{p.name}", "", 0.2))
    assert tokenizer.decode(all_documents(shards)[0]) == first.read_text()


def test_a_folder_with_other_things_or_inside_the_source_is_refused(tmp_path):
    source, other = tmp_path / "text", tmp_path / "other"
    for folder in (source, other):
        folder.mkdir()
        (folder / "a.txt").write_text("a text")
    with pytest.raises(ValueError, match=r"holds other things \(a\.txt\)"):
        prepare(str(source), other, progress=False)
    with pytest.raises(ValueError, match="lies inside the source"):
        prepare(str(source), source / "out", progress=False)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.txt", "a.txt", "other", "text"]


def test_a_second_run_waits_until_the_first_leaves_the_folder(source, tmp_path, capfd):
    out = tmp_path / "out"
    second = Thread(target=lambda: prepare(source, out, **SETTINGS))
    with locked(out, "another process is preparing"):
        second.start()
        while "waiting for it" not in capfd.readouterr().err and second.is_alive():
            sleep(0.01)
        with pytest.raises(ValueError, match="is training in"), locked(out, "another process is training in"):
            pass
        assert second.is_alive()
        assert not list(out.iterdir())
    second.join(60)
    assert TokenShards(out).documents > 0


def test_who_waited_for_a_folder_that_was_removed_keeps_others_out_of_the_new_one(tmp_path, capfd):
    out, taken, leave = tmp_path / "out", Event(), Event()

    def second() -> None:
        with locked(out, "the first has", wait=True):
            taken.set()
            leave.wait(60)

    waiting = Thread(target=second)
    with locked(out, "nobody has"):
        waiting.start()
        while "waiting for it" not in capfd.readouterr().err and waiting.is_alive():
            sleep(0.01)
    assert taken.wait(60)
    with pytest.raises(ValueError, match="the second has"), locked(out, "the second has"):
        pass
    leave.set()
    waiting.join(60)
    assert not out.exists()


def test_faults_of_the_caller_are_named(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [10, 10])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "a"}) + "\nno json\n")
    (tmp_path / "file").write_text("")
    for number, (source, settings, text) in enumerate([
        (lines, {"held_out": 1.0}, r"held_out is a share of the documents in \[0, 1\)"),
        (lines, {"held_out": 0.999999999}, "took all 2 documents"),
        (lines, {"vocab_size": 300}, "vocab_size goes with tokenizer 'bpe'"),
        (lines, {"limit_tokens": 5}, "limit_tokens=5 is less than the first document"),
        (lines, {"workers": 0}, "workers must be at least 1"),
        (tmp_path / "empty.txt", {}, "holds no text"),
        (tmp_path / "bad.jsonl", {}, r"bad\.jsonl, line 2"),
    ]):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            prepare(str(source), tmp_path / f"out{number}", progress=False, **settings)
    with pytest.raises(ValueError, match=r"cannot write .*file/out: Not a directory"):
        prepare(str(lines), tmp_path / "file" / "out", progress=False)
