"""Tokenizers: lossless where they promise it, saved and opened, streamed without half characters."""

from __future__ import annotations

import json

import pytest

from titanmem.data.tokenizer import ByteTokenizer, TextStream, load_tokenizer, train_bpe

TEXTS = ["", "plain text", "naïve 日本語 🏳️‍🌈\r\n\ttab  two", "a <|endoftext|> b </s>", "\ufffd broken", "नमस्ते"]
KINDS = ["bytes", "bpe", "piece"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """One of each kind whose package is installed."""
    made = {"bytes": ByteTokenizer()}
    try:
        import tokenizers  # noqa: F401

        made["bpe"] = train_bpe(["the cat sat on the mat, the naïve cat"] * 3, 300)
    except ModuleNotFoundError:
        pass
    try:
        import sentencepiece

        prefix = str(tmp_path_factory.mktemp("piece") / "model")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a naïve cat"] * 9), model_prefix=prefix, vocab_size=300,
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        made["piece"] = load_tokenizer(prefix + ".model")
    except ModuleNotFoundError:
        pass
    return made


def pick(tokenizers, kind):
    if kind not in tokenizers:
        pytest.skip(f"the package for {kind} tokenizers is not installed")
    return tokenizers[kind]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_round_trips_and_never_holds_the_end(tokenizers, kind, text):
    tokenizer = pick(tokenizers, kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert tokenizer.end not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_batch([text, "x"])[0] == ids
    assert tokenizer.encode_arrays([text])[0].tolist() == ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_its_bytes_and_halves_of_characters_are_question_marks(tokenizers, kind):
    tokenizer = pick(tokenizers, kind)
    ids = tokenizer.encode("é日 the cat")
    assert b"".join(tokenizer.token_bytes(i) for i in ids).replace(b" ", b"") == "é日thecat".encode()
    assert tokenizer.token_bytes(tokenizer.end) == b""
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_bytes_drop_what_would_end_a_document():
    assert ByteTokenizer().encode("a\0b") == [97, 98]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_opens_what_it_saved(tokenizers, kind, tmp_path):
    tokenizer = pick(tokenizers, kind)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.kind, again.end, again.vocab_size) == (tokenizer.kind, tokenizer.end, tokenizer.vocab_size)
    assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]


def test_training_twice_gives_the_same_tokenizer():
    pytest.importorskip("tokenizers", reason="training needs the package tokenizers")
    texts = ["to be or not to be", "that is the question"] * 5
    assert train_bpe(iter(texts), 280).backend.to_str() == train_bpe(iter(texts), 280).backend.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_shows_whole_characters_as_soon_as_they_are_whole(tokenizers, kind):
    tokenizer = pick(tokenizers, kind)
    text = "the naïve 日本 🏳️‍🌈 cat"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    shown = [stream.push(i) for i in ids]
    assert "".join(shown) + stream.finish() == tokenizer.decode(ids) == text
    for count in range(len(ids) + 1):
        assert "".join(shown[:count]) == tokenizer.decode(ids[:count]).rstrip("\ufffd")


def test_a_stream_ends_with_what_never_became_a_character():
    stream = TextStream(ByteTokenizer())
    shown = [stream.push(i) for i in b"a\xf0\x9f\xff\xe2\x82"]
    assert "".join(shown) + stream.finish() == b"a\xf0\x9f\xff\xe2\x82".decode(errors="replace")


def test_the_end_of_a_foreign_tokenizer_is_found_or_asked_for(tmp_path):
    library = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    backend = library.Tokenizer(library.models.WordLevel({"a": 0, "stop": 5, "?": 1}, unk_token="?"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no token that ends a document"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "stop"}}))
    opened = load_tokenizer(tmp_path / "tokenizer.json")
    assert (opened.end, opened.vocab_size) == (5, 6)


def test_faults_say_what_is_missing(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for spec, text in [
        (tmp_path, "holds no tokenizer"),
        (tmp_path / "none.json", "no tokenizer file"),
        (tmp_path / "bad.json", "not a readable tokenizer.json"),
        ("./nowhere", "no tokenizer folder"),
    ]:
        if str(spec).endswith("bad.json"):
            pytest.importorskip("tokenizers", reason="needs the package tokenizers")
        with pytest.raises(ValueError, match=text):
            load_tokenizer(spec)
