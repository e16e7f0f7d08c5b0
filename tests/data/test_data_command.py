"""`titanmem data`."""

from __future__ import annotations

import argparse

import pytest
from corpus import write_files

from titanmem.cli import data


def call(*words):
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(w) for w in words]))


def test_prepare_check_and_show(tmp_path, capsys):
    source, out = write_files(tmp_path / "source"), tmp_path / "out"
    assert call("prepare", source, out, "--held-out", "0.2", "--limit-documents", "30") == 0
    assert "train      23 documents" in capsys.readouterr().out
    assert call("check", out) == 0
    assert "held       1 shard" in capsys.readouterr().out
    assert call("show", out) == 0
    text = capsys.readouterr().out
    for part in (f"source     {source}", "bytes, 256 ids", "the longest documents have", "begins     '"):
        assert part in text


def test_the_command_in_an_error_makes_the_shard_again(tmp_path):
    source, out = write_files(tmp_path / "source"), tmp_path / "out"
    call("prepare", source, out, "--limit-tokens", "2000", "--shard-tokens", "700", "--workers", "1")
    (out / "train-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"train-00001\.safetensors is missing") as error:
        call("check", out)
    command = str(error.value).partition("made again by: titanmem data ")[2]
    assert call(*command.split()) == 0
    assert call("check", out) == 0
