"""The classifier of sequences: padding, the other strand, and where its weights come from."""

from __future__ import annotations

import pytest
import torch

import titanmem
from support import assert_close, randomise
from titanmem import TitansConfig, TitansLM
from titanmem.data.dna import VOCABULARY, reverse_complement
from titanmem.models.base import ModelConfig
from titanmem.models.sequence import CnnConfig, SequenceClassifier, SequenceConfig
from titanmem.recipes.dna import DNA_MODELS, classification

TRUNKS = ["lmm", "mac", "mag", "mal", "attention", "cnn"]
LENGTHS = torch.tensor([9, 23, 1, 16, 4])


def small_trunk(name: str) -> ModelConfig:
    if name == "cnn":
        return CnnConfig(VOCABULARY, dim=8, num_layers=2, width=3)
    return TitansConfig(
        VOCABULARY, 16, 2, 2, name, mlp_width=24, window_len=7, segment_len=6, num_persistent=3,
        memory={"chunk_len": 4, "num_heads": 2, "expansion": 2},
    )  # fmt: skip


def classifier(name: str, **settings) -> SequenceClassifier:
    torch.manual_seed(0)
    model = SequenceConfig(small_trunk(name), ("a", "b", "c"), **settings).build().double().eval()
    randomise(model)
    return model


def random_rows(longest: int = 23) -> torch.Tensor:
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(1))
    return ids.masked_fill(torch.arange(longest) >= LENGTHS.unsqueeze(1), 0)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("trunk", TRUNKS)
@torch.no_grad()
def test_padding_and_other_rows_change_no_prediction(trunk, both):
    model = classifier(trunk, both_strands=both)
    ids = random_rows()
    found = model(ids, LENGTHS)[0]
    wider = torch.nn.functional.pad(ids, (0, 9))
    assert_close([model(wider, LENGTHS)[0]], [found])
    alone = [model(row[:count].unsqueeze(0))[0] for row, count in zip(ids, LENGTHS, strict=True)]
    assert_close([torch.cat(alone)], [found])
    assert_close([found.exp().sum(-1)], [torch.ones(5, dtype=torch.float64)])
    assert found.std(0).min() > 1e-3


@pytest.mark.parametrize("trunk", TRUNKS)
@torch.no_grad()
def test_with_both_strands_a_sequence_and_its_reverse_complement_are_one(trunk):
    ids = random_rows()
    other = reverse_complement(ids, LENGTHS)
    both, one = classifier(trunk, both_strands=True), classifier(trunk)
    assert_close([both(other, LENGTHS)[0]], [both(ids, LENGTHS)[0]])
    mean = (one(ids, LENGTHS)[0].exp() + one(other, LENGTHS)[0].exp()) / 2
    assert_close([both(ids, LENGTHS)[0].exp()], [mean])
    assert (one(other, LENGTHS)[0] - one(ids, LENGTHS)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("trunk", TRUNKS)
def test_every_parameter_learns_and_the_loss_is_that_of_the_labels(trunk):
    model = classifier(trunk)
    labels = torch.tensor([0, 2, 1, 1, 0])
    loss, state = model(random_rows(), LENGTHS, labels)
    loss.backward()
    assert state is None
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    expected = -model(random_rows(), LENGTHS)[0].gather(1, labels.unsqueeze(1)).sum()
    assert_close([loss.detach()], [expected.detach()])


def test_it_is_saved_and_loaded_with_its_trunk(tmp_path):
    for trunk in ("mac", "cnn"):
        model = classifier(trunk).float()
        model.save(tmp_path / trunk)
        loaded = titanmem.load(tmp_path / trunk).eval()
        assert loaded.config == model.config
        assert torch.equal(loaded(random_rows(), LENGTHS)[0], model(random_rows(), LENGTHS)[0])


def test_a_classifier_takes_the_weights_of_a_pretrained_model():
    language = TitansLM(small_trunk("lmm"))
    randomise(language, seed=3)
    first, second = classifier("lmm").float(), classifier("lmm").float()
    head = first.head.weight.clone()
    first.adopt(language, "init=x")
    for name, weight in language.named_parameters():
        assert torch.equal(dict(first.trunk.named_parameters())[name], weight)
    assert torch.equal(first.head.weight, head)
    randomise(first, seed=4)
    second.adopt(first, "init=y")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"init=x is another model \(.*block='lmm' there, 'mac' here"):
        classifier("mac").adopt(language, "init=x")


def test_all_models_of_a_task_are_of_one_size():
    sizes = [classification(name, "").model.parameters() for name in DNA_MODELS]
    assert max(sizes) < 1.05 * min(sizes)


def test_settings_that_cannot_work_are_refused():
    for settings, fault in [
        ({"classes": ["a"]}, "at least two different names"),
        ({"classes": ["a", "a"]}, "at least two different names"),
        ({"dropout": 1.0}, "dropout must lie in"),
        ({"length": 0}, "length must be a whole number of at least 1"),
        ({"trunk": TitansConfig(6, 16, 1, 2, "lmm", tie_embeddings=False)}, "tie_embeddings=true"),
    ]:
        with pytest.raises(ValueError, match=fault):
            SequenceConfig(**{"trunk": small_trunk("lmm"), **settings})
