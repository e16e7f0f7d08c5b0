"""The recall task can be answered from its row."""

from __future__ import annotations

import pytest
import torch

from titanmem.tasks.recall import recall_batch


def test_every_key_is_asked_once_and_its_value_is_in_the_row():
    ids, targets = recall_batch(4, 30, 10, vocab=24, generator=torch.Generator().manual_seed(0))
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:20:2], row[1:20:2], strict=True))
        asked = {row[i]: t for i, t in enumerate(target) if t != -100}
        assert asked == value
        assert len(value) == 10
        assert max(value) < 12 <= min(value.values())
    for length, pairs in [(29, 10), (99, 13)]:
        with pytest.raises(ValueError, match="pairs"):
            recall_batch(1, length, pairs, vocab=24)


def test_many_questions_ask_for_what_the_row_says():
    ids, targets = recall_batch(4, 40, 3, vocab=24, questions=30, generator=torch.Generator().manual_seed(0))
    assert ((targets >= 0).sum(1) == 30).all()
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:6:2], row[1:6:2], strict=True))
        assert all(t == value[row[i]] for i, t in enumerate(target) if t != -100)
