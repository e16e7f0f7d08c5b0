"""From a summary token on, only its own representation counts."""

from __future__ import annotations

import pytest
import torch

from support import assert_close, random_ids, small_model
from titanmem import TitansConfig

SUMMARY = 39


def rows(seed=0):
    ids = random_ids(2, 14, vocab=SUMMARY, seed=seed)
    ids[:, 6] = SUMMARY
    return ids


@pytest.mark.parametrize("case", ["attention", "lmm", "rmt"])
def test_what_follows_a_summary_is_decoded_from_it_alone(case):
    model, ids = small_model(case, summary_id=SUMMARY), rows()
    logits, _ = model(ids)
    other = ids.clone()
    other[:, 7:] = rows(seed=1)[:, 7:]  # marks may be anything
    assert_close([model(other)[0]], [logits])
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % SUMMARY
    later = (model(changed)[0] - logits).abs().amax(-1)[:, 6:]
    assert (later > 0).all()
    assert logits[:, 6:].unique(dim=1).shape[1] == 8  # every place has its own answer


def test_a_place_is_where_it_stands_after_the_summary():
    model, ids = small_model("attention", summary_id=SUMMARY), rows()
    first, state = model(ids[:, :9])
    second, _ = model(ids[:, 9:], state)
    assert_close([torch.cat([first, second], 1)], [model(ids)[0]])
    assert state.summary.place.tolist() == [2, 2]
    plain = small_model("attention")
    assert plain(ids)[1].summary is None


def test_an_id_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="summary_id must lie in 0 … 39"):
        TitansConfig(40, 16, 1, 2, summary_id=40)
    model = small_model("summary")
    with pytest.raises(ValueError, match="reads ids"):
        model.hidden(model.embedding(rows()))
