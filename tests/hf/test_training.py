"""Trainer, gradient checkpointing and PEFT on TitansForCausalLM."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from support import BLOCK_CASES, assert_close, random_ids, small_model
from titanmem.hf import TitansForCausalLM


def wrapped(case="mac", **changes):
    return TitansForCausalLM.from_core(small_model(case, **changes))


def test_trainer_lowers_the_loss_and_saves_what_it_trained(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in random_ids(8, 12)]
    settings = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, save_steps=6, lr_scheduler_type="constant", gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(wrapped(dtype=torch.float32), TrainingArguments(max_steps=12, **settings), train_dataset=rows)
    trainer.train()
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    assert losses[-1] < 0.7 * losses[0]
    assert trainer.evaluate(rows)["eval_loss"] < losses[0]
    saved = TitansForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert_close(saved.parameters(), trainer.model.parameters(), rtol=0)


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_checkpointing_recomputes_the_same_gradients(case):
    model, ids = wrapped(case).train(), random_ids(2, 13)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters()]

    calls = []
    model.core.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    plain = gradients()
    once = len(calls)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert_close(gradients(), plain)
    assert len(calls) == 3 * once
    model.gradient_checkpointing_disable()
    assert_close(gradients(), plain)
    assert len(calls) == 4 * once


def test_lora_trains_and_saves_only_its_adapters(tmp_path):
    ids = random_ids(2, 13)
    base = wrapped(dtype=torch.float32)
    before = base(ids).logits
    lora = LoraConfig(target_modules=["qkv", "out", "up", "down"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    after = model(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3
    steps = [model(input_ids=ids[:, :5], use_cache=True)]
    steps += [model(input_ids=t, past_key_values=steps[0].past_key_values) for t in ids[:, 5:].split(1, 1)]
    assert_close([torch.cat([step.logits for step in steps], 1)], [after], rtol=1e-4)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(wrapped(dtype=torch.float32).eval(), tmp_path)
    assert_close([again(input_ids=ids).logits], [after], rtol=1e-5)
    assert_close([again.merge_and_unload()(ids).logits], [after], rtol=1e-4)
