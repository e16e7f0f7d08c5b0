"""Labelled sequences: every layout gives the same rows, and faults name their place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from titanmem.data.dna import decode_bases
from titanmem.data.labelled import Split, read_labelled

GUE = Path(__file__).parents[2] / "data" / "gue"
ROWS = [("ACGTT", "b"), ("CCNGAA", "a"), ("TTT", "b"), ("GACGACG", "a")]


def rows_of(split: Split, classes) -> list[tuple[str, str]]:
    cut = zip(split.starts[:-1], split.starts[1:], strict=True)
    return [(decode_bases(split.bases[a:b].tobytes()), classes[i]) for (a, b), i in zip(cut, split.labels, strict=True)]


def table(rows, end="\n", mark=",") -> str:
    return f"sequence{mark}label{end}" + "".join(f"{bases}{mark}{label}{end}" for bases, label in rows)


def write_gue(folder: Path) -> Path:
    for split in ("train", "dev", "test"):
        (folder / f"{split}.csv").write_text(table(ROWS))
    return folder


def write_genomic(folder: Path) -> Path:
    for split in ("train", "dev", "test"):
        for number, (bases, label) in enumerate(ROWS):
            place = folder / split / label
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.txt").write_text(bases)
    return folder


@pytest.mark.parametrize("write", [write_gue, write_genomic])
def test_every_layout_gives_all_rows_of_all_splits(tmp_path, write):
    found = read_labelled(str(write(tmp_path)))
    assert found.classes == ("a", "b")
    assert list(found.splits) == ["train", "dev", "test"]
    for split in found.splits.values():
        assert sorted(rows_of(split, found.classes)) == sorted(ROWS)


def test_a_set_of_the_package_is_read_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".genomic_benchmarks" / "demo").mkdir(parents=True)
    write_genomic(tmp_path / ".genomic_benchmarks" / "demo")
    assert len(read_labelled("genomic:demo").splits["test"]) == 4
    with pytest.raises(ValueError, match="needs the package genomic-benchmarks"):
        read_labelled("genomic:other")


def test_tables_may_have_other_ends_marks_columns_and_cases(tmp_path):
    held = {
        "a.csv": table(ROWS, "\r\n").lower().encode(),
        "b.tsv": b"\xef\xbb\xbf" + table(ROWS, mark="\t").encode(),
        "c.csv.gz": gzip.compress(table(ROWS).replace(",", ",x,").encode()),
        "d.csv": table([(f'"{a}"', b) for a, b in ROWS]).encode() + b"\n",
        "e.csv": table(ROWS, mark=";").encode(),
    }
    for name, text in held.items():
        (tmp_path / name).write_bytes(text)
        found = read_labelled(str(tmp_path / name), dev=0.0)
        assert rows_of(found.splits["train"], found.classes) == ROWS
    (tmp_path / "f.csv").write_text(table(ROWS).replace("sequence,label", "Bases,Class"))
    found = read_labelled(str(tmp_path / "f.csv"), dev=0.0, columns=("bases", "class"))
    assert rows_of(found.splits["train"], found.classes) == ROWS


def test_classes_that_are_numbers_stand_in_their_order(tmp_path):
    (tmp_path / "a.csv").write_text(table([("A", "10"), ("C", "9"), ("G", "-1")]))
    assert read_labelled(str(tmp_path / "a.csv"), dev=0.0).classes == ("-1", "9", "10")


def test_equal_sequences_are_never_in_both_splits(tmp_path):
    rows = [(f"{'ACGT' * (i % 50 + 1)}{'AC' * (i % 7)}", str(i % 2)) for i in range(600)]
    (tmp_path / "a.csv").write_text(table(rows))
    found = read_labelled(str(tmp_path / "a.csv"), dev=0.2)
    train, dev = ({bases for bases, _ in rows_of(found.splits[name], found.classes)} for name in ("train", "dev"))
    assert not train & dev
    assert 60 < len(found.splits["dev"]) < 200
    assert len(found.splits["dev"]) + len(found.splits["train"]) == 600


def test_a_cut_keeps_the_first_bases(tmp_path):
    found = read_labelled(str(write_gue(tmp_path)))
    cut = found.splits["dev"].cut(4)
    assert rows_of(cut, found.classes) == [(bases[:4], label) for bases, label in ROWS]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "line 1: no column sequence and no column label in it"),
        (b"ACGT,1\n", "line 1: no column sequence and no column label in acgt, 1"),
        (b"sequence,label\nACGT,1\nAC-T,0\n", r"line 3: the gap '-' is no base"),
        (b'sequence,label\nACGT,1\n"AC\nGT",1\n,0\n', "line 5: the sequence is empty"),
        (b"sequence,label\nACGT,1\nACGT\n", "line 3: expected 2 columns, got 1"),
        (b"sequence,label\nACGT,\n", "line 2: the label is empty"),
        (b"sequence,label\nACGT,1\n\xff\xfe\x00\n", "line 3: expected 2 columns, got 1"),
        (b"sequence,label\nACGT,1\nAC\xffT,1\n", "line 3: the byte 255 is no base"),
        (b"sequence,label\nACGT,1\nACGT,\xff\n", r"line 3: the label .* is no text in UTF-8"),
        (b"sequence,label\n", "the train split of .* is empty"),
    ],
)
def test_faults_name_the_line(tmp_path, text, fault):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ValueError, match=fault):
        read_labelled(str(tmp_path / "a.csv"), dev=0.0)


def test_a_label_that_training_has_not_seen_is_named_with_its_place(tmp_path):
    write_gue(tmp_path)
    (tmp_path / "test.csv").write_text(table([*ROWS, ("ACGT", "c")]))
    with pytest.raises(ValueError, match=r"test\.csv, line 6: the label 'c' is none of a, b"):
        read_labelled(str(tmp_path))
    place = write_genomic(tmp_path / "other") / "test" / "a" / "bad.txt"
    place.write_text("ACGT\nHELLO\n")
    with pytest.raises(ValueError, match=r"bad\.txt, line 2: 'E' is no base"):
        read_labelled(str(tmp_path / "other"))


@pytest.mark.skipif(not GUE.is_dir(), reason="needs GUE in data/gue")
@pytest.mark.parametrize(
    ("task", "sizes", "length"),
    [
        ("tf/0", (32378, 1000, 1000), 101), ("tf/1", (30672, 1000, 1000), 101), ("tf/2", (19000, 1000, 1000), 101),
        ("tf/3", (27294, 1000, 1000), 101), ("tf/4", (19000, 1000, 1000), 101),
        ("prom/prom_core_all", (47356, 5920, 5920), 70), ("prom/prom_core_tata", (4904, 613, 613), 70),
        ("prom/prom_300_tata", (4904, 613, 613), 300),
    ],
)  # fmt: skip
def test_the_splits_of_gue_are_the_official_ones(task, sizes, length):
    found = read_labelled(str(GUE / task))
    assert found.classes == ("0", "1")
    assert tuple(len(found.splits[name]) for name in ("train", "dev", "test")) == sizes
    assert all((split.lengths == length).all() for split in found.splits.values())
