"""Memories inside Llama and Qwen: nothing changes at first, and the state follows the cache."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from support import assert_close, random_ids, randomise
from titanmem.hf import add_memory, freeze_base, load_memory, memory_parameters, save_memory
from titanmem.hf.adapter import branches

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
LEFT = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])


def base_model(family="llama"):
    model, config = FAMILIES[family]
    torch.manual_seed(0)
    return model(config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    )).double().eval()  # fmt: skip


def with_memory(family="llama", moved=True):
    model = add_memory(base_model(family), layers=[0, -1], num_heads=2, chunk_len=4, expansion=2)
    for branch in branches(model) if moved else ():
        randomise(branch, seed=branch.index)
    return model


def generate(model, ids, mask=None, **settings):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0, **settings)


@every_family
def test_new_memories_change_no_output(family):
    ids = random_ids(2, 11)
    assert torch.equal(with_memory(family, moved=False)(ids).logits, base_model(family)(ids).logits)


@every_family
def test_steps_equal_the_whole_and_a_new_sequence_starts_afresh(family):
    model, ids = with_memory(family), random_ids(2, 11)
    whole = model(ids, use_cache=False).logits
    assert (whole - base_model(family)(ids).logits).abs().max() > 1e-3
    first = model(ids[:, :5])
    steps = [model(token, past_key_values=first.past_key_values).logits for token in ids[:, 5:].split(1, 1)]
    assert_close([torch.cat([first.logits, *steps], 1)], [whole])
    assert_close([model(ids).logits], [whole])


@every_family
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_follows_beams_and_ignores_left_padding(family, beams):
    model, ids = with_memory(family), random_ids(2, 11)
    out = generate(model, ids, LEFT, num_beams=beams)
    assert torch.equal(out, generate(model, ids, LEFT, num_beams=beams, use_cache=False))
    assert torch.equal(out[:1, 11:], generate(model, ids[:1, 4:], num_beams=beams)[:, 7:])


@torch.no_grad()
def test_a_cache_carries_the_memory_through_batches_and_copies():
    model, ids = with_memory(), random_ids(3, 11)
    cache = model(ids[:, :5]).past_key_values
    fork = copy.deepcopy(cache)
    fork.batch_select_indices(torch.tensor([2, 0]))
    fork.batch_repeat_interleave(2)
    rows = ids[[2, 2, 0, 0]]
    assert_close([model(rows[:, 5:], past_key_values=fork).logits], [model(rows).logits[:, 5:]])
    assert_close([model(ids[:, 5:], past_key_values=cache).logits], [model(ids).logits[:, 5:]])
    with pytest.raises(ValueError, match="cannot unread tokens"):
        cache.crop(2)


def test_memories_train_alone_with_and_without_checkpointing():
    model, ids = with_memory(moved=False).train(), random_ids(2, 11)
    freeze_base(model)
    ours = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert ours
    assert all("memory_branch" in name for name in ours)
    optimiser = torch.optim.Adam(ours.values(), lr=3e-2)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    model.zero_grad()
    model(ids, attention_mask=LEFT, labels=ids).loss.backward()
    plain = [p.grad for p in ours.values()]
    assert all(grad.abs().sum() > 0 for grad in plain)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, attention_mask=LEFT, labels=ids, use_cache=False).loss.backward()
    assert_close([p.grad for p in ours.values()], plain)


def test_memories_are_saved_apart_from_the_base(tmp_path):
    model, ids = with_memory(), random_ids(2, 11)
    save_memory(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"memory_config.json", "memory.safetensors"}
    again = load_memory(base_model(), tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_memories_learn_beside_lora_once_they_are_unfrozen():
    model, ids = with_memory(), random_ids(2, 11)
    lora = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert not any(p.requires_grad for p in memory_parameters(model))
    for parameter in memory_parameters(model):
        parameter.requires_grad_(True)
    lora(ids, labels=ids).loss.backward()
    trained = [name for name, p in lora.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    ours = [name for name in trained if "memory_branch" in name]
    assert len(ours) == len(list(memory_parameters(model)))
    assert all("lora_" in name for name in set(trained) - set(ours))


def test_hidden_states_include_the_memory():
    model, ids = base_model(), random_ids(2, 11)
    model(ids, output_hidden_states=True)  # their hooks are there before ours
    add_memory(model, layers=[0], num_heads=2, chunk_len=4)
    randomise(next(branches(model)))
    states = model(ids, output_hidden_states=True).hidden_states
    assert_close([model.model.layers[1](states[1], position_embeddings=model.model.rotary_emb(
        states[1], torch.arange(11).unsqueeze(0)), memory_mask=None)], [states[2]])  # fmt: skip


def test_mistakes_are_explained(tmp_path):
    ids = random_ids(2, 11)
    with pytest.raises(ValueError, match=r"layers must lie in -3 … 2, got \[3\]"):
        add_memory(base_model(), layers=[3])
    for layers in (1, "1", [1.0], [True], [None]):
        with pytest.raises(ValueError, match="layers must be a list of whole numbers"):
            add_memory(base_model(), layers=layers)
    with pytest.raises(ValueError, match=r"GPTNeoXLayer takes no .*; add_memory knows Llama, Qwen"):
        add_memory(GPTNeoXForCausalLM(GPTNeoXConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        )))  # fmt: skip
    for name in ("memory.safetensors", "memory_config.json"):
        folder = tmp_path / f"damaged {name}"
        save_memory(with_memory(), folder)
        file = folder / name
        file.write_bytes(file.read_bytes()[:20])
        base = base_model()
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            load_memory(base, folder)
        assert not list(branches(base))
    with pytest.raises(ValueError, match="has memories already"):
        add_memory(with_memory())
    with pytest.raises(ValueError, match="has no memories"):
        save_memory(base_model(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"memory_config\.json"):
        load_memory(base_model(), tmp_path)
    with pytest.raises(ValueError, match="has not read; start with a new cache"):
        with_memory()(ids, past_key_values=base_model()(ids).past_key_values)
    model = with_memory()
    with pytest.raises(ValueError, match="use a dynamic cache"):
        generate(model, ids, past_key_values=StaticCache(config=model.config, max_cache_len=32))
