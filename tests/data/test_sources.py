"""Sources: every document once, in a fixed order, from any form; faults name the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle

import pytest
from corpus import write_files

from titanmem.data import files
from titanmem.data.sources import is_held_out, open_source

TEXTS = [f"document {i} — naïve\n" * (1 + i % 4) for i in range(30)]


def read_all(spec):
    source = pickle.loads(pickle.dumps(open_source(str(spec))))  # as a worker process sees it
    assert len(source.parts) == len(source.sizes) == len(set(source.parts))
    return [document for part in source.parts for document in source.documents(part)]


def as_lines(field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def pack_zst(data):
    library = pytest.importorskip("zstandard", reason=".zst needs the package zstandard")
    half = len(data) // 2  # two frames, as parallel compressors write them
    return library.ZstdCompressor().compress(data[:half]) + library.ZstdCompressor().compress(data[half:])


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": pack_zst}


@pytest.mark.parametrize("packing", PACKERS)
def test_every_packing_gives_the_same_documents(packing, tmp_path):
    (tmp_path / f"lines.jsonl{packing}").write_bytes(PACKERS[packing](as_lines("body")))
    (tmp_path / f"text.md{packing}").write_bytes(PACKERS[packing](b"one\r\nfile"))
    assert [d.text for d in read_all(f"{tmp_path}/*.jsonl{packing}?field=body")] == TEXTS
    assert read_all(tmp_path / f"text.md{packing}") == [(f"text.md{packing}", "one\r\nfile")]


@pytest.mark.parametrize("size", [1, 37, 64, 10**6])
def test_lines_cut_into_ranges_come_once_and_in_order(size, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RANGE", size)
    (tmp_path / "lines.jsonl").write_bytes(as_lines() + b"\n  \n" + as_lines().rstrip(b"\n"))
    assert [d.text for d in read_all(tmp_path / "lines.jsonl")] == TEXTS * 2


def test_parquet_row_groups_are_parts(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason=".parquet needs the package pyarrow")
    import pyarrow.parquet

    table = arrow.table({"id": list(range(30)), "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=8)
    (tmp_path / "packed.parquet.gz").write_bytes(gzip.compress((tmp_path / "rows.parquet").read_bytes()))
    assert len(open_source(str(tmp_path / "rows.parquet")).parts) == 4
    for name in ("rows.parquet", "packed.parquet.gz"):
        assert [d.text for d in read_all(tmp_path / name)] == TEXTS
    with pytest.raises(ValueError, match=r"rows\.parquet has no column 'body', only id, text"):
        read_all(f"{tmp_path}/rows.parquet?field=body")
    with pytest.raises(ValueError, match=r"row group 0, row 0: column 'id' must hold texts, got int"):
        read_all(f"{tmp_path}/rows.parquet?field=id")


def test_folders_and_globs_are_sorted_and_leave_out_the_hidden_and_unknown(tmp_path):
    write_files(tmp_path, 9)
    for extra in (".git/config.txt", "0/.hidden.txt", "0/picture.png"):
        (tmp_path / extra).parent.mkdir(exist_ok=True)
        (tmp_path / extra).write_text("no")
    names = [d.name for d in read_all(tmp_path)]
    assert names == sorted(names)
    assert len(names) == 9
    assert [d.name for d in read_all(f"{tmp_path}/**/*.txt")] == names
    assert [d.name for d in read_all(f"{tmp_path}/1/*")] == ["001.txt", "004.txt", "007.txt"]


def test_python_is_its_library_without_tests():
    source = open_source("python")
    assert "json/decoder.py" in source.parts
    assert not [p for p in source.parts if "test" in p.split("/") or p.startswith(("idlelib", "site-packages"))]
    (document,) = source.documents("this.py")
    assert document.text.startswith("s = ")
    more = open_source("python+packages").parts
    assert "site-packages/numpy/__init__.py" in more
    assert set(source.parts) < set(more)


def test_a_hub_data_set_is_read_shard_by_shard(tmp_path):
    pytest.importorskip("datasets", reason="hf: needs the package datasets")
    for number in range(3):
        lines = as_lines().splitlines(keepends=True)[10 * number : 10 * number + 10]
        (tmp_path / f"part-{number}.jsonl").write_bytes(b"".join(lines))
    source = open_source(f"hf:{tmp_path}::train")
    assert len(source.parts) == 3
    assert [d.text for d in read_all(f"hf:{tmp_path}")] == TEXTS
    with pytest.raises(ValueError, match=r"row 0: expected a text in 'body', the columns are id, text"):
        read_all(f"hf:{tmp_path}?field=body")
    with pytest.raises(ValueError, match="cannot open"):
        open_source(f"hf:{tmp_path}::nosplit")


def test_faults_name_the_file_and_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RANGE", 50)
    good = b'{"text": "a"}\n'
    for name, data, text in [
        ("a.jsonl", good * 9 + b'{"txt": 1}\n', r"a\.jsonl, line 10: has no field 'text', only txt"),
        ("b.jsonl", good + b"\n{oops\n", r"b\.jsonl, line 3: expected one JSON object per line"),
        ("c.json", good + b"[1]\n", r"c\.json, line 2: expected a JSON object, got list"),
        ("d.jsonl.gz", gzip.compress(good + b'{"text": null}\n'), r"d\.jsonl\.gz, line 2: field 'text' must be a text"),
        ("e.txt", b"fine\n\xff", r"e\.txt, line 2 is not UTF-8"),
        ("f.txt.gz", gzip.compress(b"text" * 99)[:-9], r"cannot read .*f\.txt\.gz"),
        ("g.txt.xz", b"no xz", r"cannot read .*g\.txt\.xz"),
        ("h.tex", b"x", r"h\.tex is of no known kind"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=text):
            read_all(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for spec, text in [
        (tmp_path / "empty", "holds no file that can be read"),
        (tmp_path / "nowhere", "there is no file or folder"),
        (f"{tmp_path}/*.rst", "holds no file that can be read"),
        (f"{tmp_path}?column=x", r"the only option is \?field=NAME"),
        ("hf:", "expected hf:DATASET"),
    ]:
        with pytest.raises(ValueError, match=text):
            open_source(str(spec))


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x\\ud83d y \\ud83d\\ude00"}\n')
    assert [d.text for d in read_all(tmp_path)] == ["x? y 😀"]


def test_what_is_held_out_is_fixed_for_ever():
    chosen = [i for i in range(200) if is_held_out(f"folder/{i}.txt", "any text", 0.05)]
    assert chosen == [49, 57, 93, 95, 103, 111, 178, 198]
    assert [is_held_out("", t, 0.5) for t in TEXTS] == [is_held_out(t, "other", 0.5) for t in TEXTS]
    assert 4500 < sum(is_held_out(str(i), "", 0.05) for i in range(100_000)) < 5500
    assert not any(is_held_out(str(i), "", 0) for i in range(1000))
