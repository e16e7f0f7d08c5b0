"""Generation: choices, stops, streams, and rows that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch

from support import random_ids, small_model
from titanmem.models.generation import Sampling, choose, filter_logits, penalise, stream


def test_greedy_is_the_argmax_of_the_full_forward():
    model, ids = small_model("mac"), random_ids(2, 7)
    out = model.generate(ids, max_new_tokens=9, temperature=0)
    assert torch.equal(out[:, :7], ids)
    logits, _ = model(out)
    assert torch.equal(logits[:, 6:-1].argmax(-1), out[:, 7:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", [dict(temperature=0), dict(temperature=0.9, top_p=0.9, top_k=12, seed=5)])
def test_prompts_of_different_lengths_do_not_disturb_each_other(side, settings):
    model, ids = small_model("mag"), random_ids(3, 8)
    lengths = [8, 3, 5]
    mask = torch.stack([torch.arange(8) < n if side == "right" else torch.arange(8) >= 8 - n for n in lengths])
    out = model.generate(ids, 10, mask=mask, **settings)
    for row in range(3):
        seed = {"seed": settings["seed"] + row} if "seed" in settings else {}
        alone = model.generate(ids[row : row + 1, mask[row]], 10, **(settings | seed))
        assert torch.equal(out[row, 8:], alone[0, lengths[row] :])


def test_a_seed_decides_the_text_and_rows_differ():
    model, ids = small_model("lmm"), random_ids(1, 4).expand(2, -1)
    a, b = (model.generate(ids, 12, seed=3) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, model.generate(ids, 12, seed=4))
    assert not torch.equal(a[0], a[1])


def test_numbers_between_0_and_1_meet_every_token_as_often_as_it_is_likely():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0, -torch.inf]])
    numbers = torch.arange(1000) / 1000
    drawn = choose(logits.expand(1000, -1), Sampling(temperature=0.5), None, numbers)
    found = drawn.bincount(minlength=5) / 1000
    assert torch.allclose(found, (2 * logits[0]).softmax(-1), atol=2e-3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(temperature):
    model = small_model("lmm")
    with torch.no_grad():
        model.norm.scale[0] = torch.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(random_ids(1, 4), 2, temperature=temperature)


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    assert torch.isfinite(filter_logits(logits, 2, None)).tolist() == [[True, False, True, False]]
    assert torch.isfinite(filter_logits(logits, None, 0.5)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(filter_logits(logits, None, 0.51)).tolist() == [[True, False, True, False]]
    assert torch.isfinite(filter_logits(logits, None, 1e-300)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(filter_logits(logits, None, 1.0)).all()


def test_the_repetition_penalty_makes_seen_tokens_less_likely():
    seen = torch.tensor([[True, True, False]])
    assert penalise(torch.tensor([[2.0, -2.0, 1.0]]), seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]


def test_stop_ids_and_stop_strings_end_a_row():
    model, ids = small_model("lmm"), random_ids(1, 4)
    plain = model.generate(ids, 12, temperature=0)[0, 4:].tolist()
    by_id = model.generate(ids, 12, temperature=0, stop_ids=[plain[5]])[0, 4:].tolist()
    assert by_id == plain[: plain.index(plain[5]) + 1]
    decode = lambda row: "".join(chr(97 + i % 26) + str(i // 26) for i in row)
    text = decode(plain)
    stop = text[6:10]
    by_text = model.generate(ids, 12, temperature=0, stop=[stop], decode=decode)[0, 4:].tolist()
    assert stop in decode(by_text)
    assert stop not in decode(by_text[:-1])


def test_a_stream_goes_on_from_a_state():
    model, ids = small_model("mac"), random_ids(1, 6)
    whole = model.generate(ids, 8, temperature=0)
    steps = list(stream(model, ids, 3, temperature=0))
    rest = model.generate(steps[-1].ids.unsqueeze(1), 5, temperature=0, state=steps[-1].state)
    assert torch.equal(torch.cat([ids, torch.stack([s.ids for s in steps[:-1]], 1), rest], 1), whole)


def test_mistakes_are_explained():
    model, ids = small_model("lmm"), random_ids(1, 4)
    cases = [
        (dict(temperature=-1), "temperature must not be negative"),
        (dict(top_p=0), "top_p must lie in"),
        (dict(topp=0.5), "did you mean 'top_p'"),
        (dict(stop=["x"]), "stop strings need decode"),
        (dict(mask=torch.zeros(1, 4, dtype=torch.bool)), "at least one real token"),
    ]
    for settings, text in cases:
        with pytest.raises(ValueError, match=text):
            model.generate(ids, 2, **settings)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(ids[:, :0], 2)
