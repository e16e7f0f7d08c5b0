"""TitansForCausalLM is TitansLM: the same answers whole, in pieces and through transformers' generate."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from support import BLOCK_CASES, assert_close, random_ids, small_model
from titanmem.data.tokenizer import ByteTokenizer, train_bpe
from titanmem.hf import TitansCache, TitansForCausalLM, TitansHFConfig, fast_tokenizer

every_block = pytest.mark.parametrize("case", BLOCK_CASES)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


def wrapped(case="mac", **changes):
    return TitansForCausalLM.from_core(small_model(case, **changes)).eval()


def generate(model, ids, count, mask=None, **settings):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **settings)


@every_block
def test_whole_in_pieces_and_generated_it_is_the_core_model(case):
    model, ids = wrapped(case), random_ids(2, 7)
    greedy = generate(model, ids, 9, do_sample=False)
    assert torch.equal(greedy, model.core.generate(ids, 9, temperature=0))
    whole = model.core(greedy)[0]
    assert_close([model(greedy).logits], [whole])
    out, pieces = None, []
    for piece in greedy.split(5, 1):
        out = model(piece, past_key_values=None if out is None else out.past_key_values)
        pieces.append(out.logits)
    assert_close([torch.cat(pieces, 1)], [whole])
    assert out.past_key_values.get_seq_length() == 16


@pytest.mark.parametrize("settings", [dict(do_sample=False), dict(num_beams=3, do_sample=False)])
def test_left_padding_and_the_cache_change_nothing(settings):
    model, ids = wrapped("hybrid"), random_ids(2, 7)
    out = generate(model, ids, 8, LEFT, **settings)
    assert torch.equal(out, generate(model, ids, 8, LEFT, use_cache=False, **settings))
    assert torch.equal(out[:1, 7:], generate(model, ids[:1, 3:], 8, **settings)[:, 4:])


def test_sampling_draws_the_same_with_and_without_a_cache():
    model, ids = wrapped("mag"), random_ids(2, 7)
    draws = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        draws.append(generate(model, ids, 8, do_sample=True, top_k=5, use_cache=use_cache, num_return_sequences=2))
    assert torch.equal(*draws)


def test_a_conversation_goes_on_from_its_cache_and_from_a_copy_of_it():
    model, ids, more = wrapped(), random_ids(1, 7), random_ids(1, 3, seed=1)
    first = generate(model, ids, 5, do_sample=False, return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    together = torch.cat([first.sequences, more], 1)
    fresh = generate(model, together, 6, do_sample=False)
    for cache in (first.past_key_values, kept):
        assert torch.equal(generate(model, together, 6, do_sample=False, past_key_values=cache), fresh)


def test_a_cache_follows_its_rows_and_cannot_be_cropped():
    model, ids = wrapped(), random_ids(3, 7)
    cache = model(ids[:, :4]).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = ids[[2, 2, 0, 0]]
    assert_close([model(rows[:, 4:], past_key_values=cache).logits], [model(rows).logits[:, 4:]])
    with pytest.raises(ValueError, match="cannot unread tokens"):
        cache.crop(1)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_the_loss_is_transformers_convention():
    model, ids = wrapped("lmm"), random_ids(2, 7)
    right = LEFT.flip(1)
    labels = ids.masked_fill(right == 0, -100)
    loss = model(ids, attention_mask=right, labels=labels).loss
    total, _ = model.core(ids, mask=right.bool(), labels=torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1))
    assert_close([loss], [total / 9], rtol=1e-6)  # theirs is in float32
    assert_close([model(ids, attention_mask=right, labels=labels, num_items_in_batch=5).loss], [total / 5], rtol=1e-6)


def test_the_usual_arguments_do_the_usual_things():
    model, ids = wrapped(), random_ids(2, 7)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 1 + len(model.core.blocks)
    assert_close([model.core.head(out.hidden_states[-1])], [out.logits])
    assert_close([model(ids, logits_to_keep=2).logits], [out.logits[:, -2:]])
    assert_close([model(inputs_embeds=model.get_input_embeddings()(ids)).logits], [out.logits])
    assert_close([model(ids, return_dict=False)[0]], [out.logits])
    assert model.train()(ids).past_key_values is None
    frozen = model.eval()(ids, learn=False)
    assert_close([frozen.logits], [model.core(ids, learn=False)[0]])
    for arguments, text in [
        (dict(), "either input_ids or inputs_embeds"),
        (dict(input_ids=ids, attention_mask=LEFT[:, :3]), r"attention_mask must be \[2, 7\]"),
        (dict(input_ids=ids[:1], past_key_values=out.past_key_values), "the state holds 2 rows"),
        (dict(input_ids=ids, past_key_values=((),)), "must be a TitansCache"),
    ]:
        with pytest.raises(ValueError, match=text):
            model(**arguments)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_opens_again(tied, tmp_path):
    model, ids = wrapped("hybrid", tie_embeddings=tied), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, TitansForCausalLM)
    assert again.config.to_core() == model.core.config
    assert_close([again(ids).logits], [model(ids).logits])
    assert_close(again.parameters(), model.parameters(), rtol=0)
    assert (again.core.head.weight is again.core.embedding.weight) == tied
    states = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    assert_close([model.core.head(states)], [model(ids).logits])


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    wrapped("lmm").save_pretrained(tmp_path)
    TitansHFConfig.from_core(small_model("lmm", layers=3).config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the folder lacks .* weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_new_vocabulary_reaches_the_core():
    model = wrapped(dtype=torch.float32)
    model.resize_token_embeddings(44, mean_resizing=False)
    assert model(torch.tensor([[43, 1]])).logits.shape == (1, 2, 44)
    assert model.core.config.vocab_size == 44
    assert isinstance(model(torch.tensor([[43]])).past_key_values, TitansCache)


def test_folders_open_with_remote_code_where_nobody_imported_titanmem(tmp_path):
    wrapped("lmm", dtype=torch.float32).save_pretrained(tmp_path / "model")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A; assert 'titanmem' not in sys.modules; "
        f"print(type(A.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True)).__name__)"
    )
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=home)
    assert out.stdout.strip() == "TitansForCausalLM", out.stderr


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_transformers_reads_text_as_titanmem_does(kind, tmp_path):
    texts = ["def f(x):\n    return x  # ü→😀", "  spaces\ttabs\r\n", "a<|endoftext|>b", "nul\0byte", ""]
    ours = ByteTokenizer() if kind == "bytes" else train_bpe(texts * 3, 300)
    fast_tokenizer(ours).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode([*ours.encode(text), ours.end], skip_special_tokens=True) == ours.decode(ours.encode(text))
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.end, ours.end)
    batch = theirs(["abc", "a"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist()[1][-1] == 1
