"""The tokenizers of titanmem for transformers, with the same ids."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from titanmem.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, bytes_as_json


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that encodes and decodes like `tokenizer`. Batches are padded on the left."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer = bytes_as_json()
    if not isinstance(tokenizer, JsonTokenizer):
        raise ValueError(
            f"transformers needs a tokenizer.json, got a tokenizer of kind {tokenizer.kind!r}; convert it to a "
            "tokenizer.json and prepare the data with that, or wrap the model with TitansForCausalLM.from_core alone"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token=tokenizer.end_name,
        pad_token=tokenizer.end_name,
        padding_side="left",
        split_special_tokens=True,  # a text is only text
    )
