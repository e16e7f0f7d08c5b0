"""FASTA: the same records however the stream is cut, and faults with their line."""

from __future__ import annotations

import gzip
import io
import random

import pytest
import torch

from titanmem.data.dna import DnaTokenizer, decode_bases, encode_bases, reverse_complement
from titanmem.data.fasta import parse_fasta, read_fasta
from titanmem.data.sources import open_source
from titanmem.data.tokenizer import load_tokenizer


def random_fasta(seed: int) -> tuple[bytes, list[tuple[str, str]]]:
    """A file with everything that is allowed, and its records."""
    draw = random.Random(seed)
    end, text, records = draw.choice(["\n", "\r\n"]), draw.choice(["", "\ufeff"]), []
    for number in range(draw.randint(1, 5)):
        name = draw.choice(["chr1", "chr1", "x|y.2", ""])
        bases = "".join(draw.choices("ACGTNacgtnUuRYkm", k=draw.randint(1, 40)))
        text += draw.choice(["", end, f"; said {end}"]) * (number > 0)
        text += f">{name}{draw.choice(['', ' a > b', ' ;']) if name else ''}{end}"
        at = 0
        while at < len(bases):
            step = draw.randint(1, 12)
            text += bases[at : at + step] + draw.choice(["", " ", "\t"]) + end * draw.randint(1, 2)
            at += step
        plain = "".join(c if c in "ACGT" else "T" if c == "U" else "N" for c in bases.upper())
        records.append((name or f"record {number + 1}", plain))
    return text.rstrip("\r\n").encode() if draw.random() < 0.5 else text.encode(), records


class Trickle(io.RawIOBase):
    """A stream that gives a few bytes at a time."""

    def __init__(self, held: bytes, seed: int) -> None:
        self.held, self.draw = io.BytesIO(held), random.Random(seed)

    def readable(self) -> bool:
        return True

    def readinto(self, room) -> int:
        found = self.held.read(min(len(room), self.draw.randint(1, 7)))
        room[: len(found)] = found
        return len(found)


@pytest.mark.parametrize("seed", range(40))
def test_records_are_the_same_however_the_stream_is_cut(seed):
    text, records = random_fasta(seed)
    whole = list(parse_fasta(io.BytesIO(text), "f"))
    assert [(piece.name, decode_bases(piece.ids)) for piece in whole] == records
    for line_bytes in (1, 2, 3, 5, 8, 100):
        file = io.BufferedReader(Trickle(text, seed), 16)
        assert list(parse_fasta(file, "f", line_bytes=line_bytes)) == whole
    for size in (1, 3, 16):
        joined: dict[int, bytes] = {}
        for piece in parse_fasta(io.BytesIO(text), "f", size):
            assert 0 < len(piece.ids) <= size
            assert piece.start == len(joined.get(piece.record, b""))
            joined[piece.record] = joined.get(piece.record, b"") + piece.ids
        assert list(joined.values()) == [piece.ids for piece in whole]


def test_gzip_is_read_like_plain_text_whatever_its_name(tmp_path):
    text, _ = random_fasta(3)
    (tmp_path / "a.fa").write_bytes(text)
    (tmp_path / "a.fa.gz").write_bytes(gzip.compress(text[:20]) + gzip.compress(text[20:]))  # as bgzip writes it
    (tmp_path / "b.fa").write_bytes(gzip.compress(text))
    plain = list(read_fasta(tmp_path / "a.fa"))
    assert list(read_fasta(tmp_path / "a.fa.gz")) == list(read_fasta(tmp_path / "b.fa")) == plain


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", r"f\.fa holds no record"),
        (b"\n\nACGT\n", r"line 3: FASTA begins with a line '>name', got b'A"),
        (b"\x89PNG\r\n\x1a\n", "line 1: FASTA begins with"),
        (b">a\nAC\n>b\n\n>c\nA\n", r"line 3: the record 'b' has no bases"),
        (b">a\nAC\n>b\n", r"line 3: the record 'b' has no bases"),
        (b">a\r\nACGT\r\n\r\nAC-T\r\n", r"line 4: the gap '-' is no base"),
        (b">a\nACGT\nAC7T\n", r"line 3: '7' is no base"),
        (b">a\nMEDLQ*\n", r"line 2: 'E' is no base; known are A C G T U N"),
        (b">a\nAC\0\xffT\n", r"line 2: the byte 0 is no base"),
        (b">a\rACGT\r>b\rACGT\r", "line 1: the line of a name holds control characters"),
        (b">a\nAC>b\nGT\n", r"line 2: '>' is no base"),
    ],
)
def test_faults_name_the_line(text, fault):
    for line_bytes in (1, 4, 1000):
        with pytest.raises(ValueError, match=fault):
            list(parse_fasta(io.BytesIO(text), "f.fa", line_bytes=line_bytes))


def test_files_that_are_cut_off_or_missing_are_named(tmp_path):
    (tmp_path / "cut.fa.gz").write_bytes(gzip.compress(random_fasta(1)[0])[:-9])
    (tmp_path / "no.fa.gz").write_bytes(b">a\nACGT\n")
    for name in ("cut.fa.gz", "no.fa.gz", "nowhere.fa"):
        with pytest.raises(ValueError, match=f"cannot read .*{name}"):
            list(read_fasta(tmp_path / name))


def test_the_other_strand_of_the_other_strand_is_the_sequence():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 6, (7, 12), generator=draw, dtype=torch.uint8)
    lengths = torch.tensor([12, 1, 5, 7, 11, 12, 2])
    ids[torch.arange(12) >= lengths.unsqueeze(1)] = 0
    other = reverse_complement(ids, lengths)
    assert torch.equal(reverse_complement(other, lengths), ids)
    assert torch.equal(reverse_complement(reverse_complement(ids)), ids)
    swap = str.maketrans("ACGTN", "TGCAN")
    for row, back, count in zip(ids, other, lengths, strict=True):
        letters = decode_bases(bytes(row.tolist()))
        assert decode_bases(bytes(back.tolist())) == letters.translate(swap)[::-1]
        assert not back[count:].any()


def test_the_tokenizer_of_dna_keeps_the_bases_and_itself(tmp_path):
    tokenizer = load_tokenizer("dna")
    assert isinstance(tokenizer, DnaTokenizer)
    assert tokenizer.decode(tokenizer.encode("acgu NRACGT\n")) == "ACGTNNACGT"
    assert max(encode_bases(b"ACGTN")) == tokenizer.vocab_size - 1
    tokenizer.save(tmp_path)
    assert type(load_tokenizer(tmp_path)) is DnaTokenizer
    with pytest.raises(ValueError, match="'!' is no base"):
        tokenizer.encode("ACGT!")


def test_long_sequences_are_several_documents_and_those_of_n_alone_none(tmp_path, monkeypatch):
    monkeypatch.setattr("titanmem.data.sources.BASES", 10)
    (tmp_path / "a.fna").write_text(">one\nACGTACGTACGTA\n>two\nNNNNNNNNNN\nNNNNNNNNNN\nNNA\n>one\nGG\n")
    (part,) = (source := open_source(str(tmp_path))).parts
    assert [tuple(document) for document in source.documents(part)] == [
        ("a.fna/1:0", "ACGTACGTAC"), ("a.fna/1:10", "GTA"), ("a.fna/2:20", "NNA"), ("a.fna/3:0", "GG"),
    ]  # fmt: skip
