"""Shards: what is on the disk is what was written, or an error names the file."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from corpus import all_documents, make_shards

from titanmem.data.shards import TokenShards, smallest_dtype, write_shard


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path, [50, 90, 120, 30, 70])


def test_the_files_are_plain_safetensors(shards):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    for number, shard in enumerate(shards.shards):
        held = load_file(shards.folder / shard.file)
        assert held["tokens"].dtype == np.uint8
        assert held["tokens"].tolist() == shards.read(number, 0, shard.tokens).tolist()
        assert held["starts"].tolist() == shards.starts(number).tolist()
        assert len(held["starts"]) == shard.documents


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "int32")])
def test_the_smallest_type_that_fits_is_written(vocab, dtype, tmp_path):
    from titanmem.data.shards import ShardFile

    assert smallest_dtype(vocab) == dtype
    ids = np.array([0, vocab - 1, 1])
    write_shard(tmp_path / "x", dtype, np.array([0]), 3, [ids])
    assert ShardFile(tmp_path / "x", 3, 1).tokens.tolist() == ids.tolist()


def test_a_flipped_bit_is_found_by_name(shards):
    shards.verify(progress=False)
    path = shards.folder / "train-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    again = TokenShards(shards.folder)  # sizes are as before
    with pytest.raises(ValueError, match=r"train-00001\.safetensors: the content changed .* titanmem data prepare"):
        again.verify(progress=False)
    with pytest.raises(ValueError, match="the content changed"):
        TokenShards(shards.folder, verify=True)


def test_cut_missing_and_foreign_files_are_found_on_opening(shards):
    path = shards.folder / "train-00001.safetensors"
    whole = path.read_bytes()
    other = (shards.folder / "train-00000.safetensors").read_bytes()
    for data, text in [
        (whole[:-1], "is damaged: it has"),
        (whole[:20], "header cannot be read"),
        (b"", "header cannot be read"),
        (b"\xff" * 64, "header cannot be read"),
        (other, "expected 150 of 2"),
        (None, "is missing"),
    ]:
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(
            ValueError, match=rf"train-00001\.safetensors .*{text}.*titanmem data prepare .* --held-out 0"
        ):
            TokenShards(shards.folder)


def test_a_damaged_or_newer_index_is_refused(shards):
    path = shards.folder / "dataset.json"
    about = json.loads(path.read_text())
    for text, match in [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({k: v for k, v in about.items() if k != "splits"}), "is damaged"),
        (json.dumps(about | {"version": 99}), "version 99, this titanmem reads"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            TokenShards(shards.folder)


def test_an_empty_or_unknown_split_is_named(shards):
    with pytest.raises(ValueError, match=r"'held' of .* is empty"):
        TokenShards(shards.folder, "held")
    with pytest.raises(ValueError, match="no split 'test'; it has train, held"):
        TokenShards(shards.folder, "test")


def test_another_process_opens_its_own_files(shards):
    assert all_documents(pickle.loads(pickle.dumps(shards))) == all_documents(shards)
    assert [len(d) for d in all_documents(shards)] == [50, 90, 120, 30, 70]
