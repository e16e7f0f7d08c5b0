"""What earlier versions wrote stays readable: a file, a log and a manifest of every format there ever was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanmem.infer import snapshot
from titanmem.infer.folder import Base, Manifest
from titanmem.infer.tokenlog import DRAWN, GIVEN, SETTLED, Record, TokenLog

LOG_1 = (
    "746974616e6d656d206c6f6720310a0003000000a1a07027010100000002000001000000020000002c010000010000004960390a"
    "020000000000000007000000000000003ed3da4d0301000000000000"
)
MANIFEST_1 = {
    "format": 1, "id": "0123", "identity": {"model": "m", "config": "c", "vocab_size": 16}, "policy": "frozen",
    "bases": [{"tokens": 0, "log": "0.log", "state": None}, {"tokens": 8, "log": "3.log", "state": "3.safetensors"}],
    "marks": {"here": {"tokens": 8, "log": "", "state": "3.safetensors"}}, "next": 4,
}  # fmt: skip


def test_snapshots_of_format_1():
    past, about = snapshot.read(Path(__file__).with_name("format-1.session"), None)
    assert (about["format"], about["tokens"], about["name"], about["policy"]) == (1, 8, "golden", "learning")
    assert (past.tokens, past.unread, past.answered) == (8, (7,), True)
    assert float(past.logits.double().sum()) == pytest.approx(12.051658272743225, rel=1e-12)
    assert float(past.model.blocks[0].weight[0].double().sum()) == pytest.approx(3.836006209254265, rel=1e-6)


def test_logs_of_format_1(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(bytes.fromhex(LOG_1))
    records = TokenLog(path).records
    assert records == [Record(GIVEN, (1, 2, 300), True, 512), Record(DRAWN, (7,), False), Record(SETTLED)]
    path.write_bytes(b"titanmem log 2\n\0")
    with pytest.raises(ValueError, match="no session log of a format that this titanmem reads"):
        TokenLog(path)


def test_manifests_of_format_1(tmp_path):
    (tmp_path / "session.json").write_text(json.dumps(MANIFEST_1))
    found = Manifest.load(tmp_path)
    assert found.bases[1] == found.bases[-1] == Base(8, "3.log", "3.safetensors")
    assert (found.policy, found.marks["here"].tokens, found.next) == ("frozen", 8, 4)
    found.save(tmp_path)
    assert json.loads((tmp_path / "session.json").read_text()) == {**MANIFEST_1, "keys": {}}
