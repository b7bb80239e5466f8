"""Ids against other implementations, and back to text."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.weights.encoder import LONG_TEXT
from octavo.weights.fetch import cached_path
from octavo.weights.gguf import open_gguf
from octavo.weights.tokenizer import _NUM_KEPT, Tokenizer
from tests.weights.vocabularies import (
    BYTE_LEVEL,
    FOLDERS,
    GOLDEN,
    GOLDENS,
    GPT2,
    PLAIN,
    PREFIXED,
    TEXTS,
    TINY,
    TOKENIZERS,
    metadata,
    quick,
    write_folder,
)


def real_model(name: str) -> dict[str, object]:
    path = cached_path(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache: octavo pull {name}")
    with open_gguf(path) as file:
        return dict(file.metadata)


@pytest.mark.case("S73")
@pytest.mark.parametrize("name", TINY)
def test_ids_equal_those_of_an_independent_implementation(name):
    parse = name in BYTE_LEVEL  # transformers parses special tokens, sentencepiece does not
    found = [TOKENIZERS[name].encode(t, add_bos=False, parse_special=parse) for t in TEXTS[:-1]]
    assert found == TINY[name]["ids"]


def test_the_golden_texts_tell_every_way_of_cutting_words_apart():
    ids = [TINY[name]["ids"] for name in BYTE_LEVEL]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.real
@pytest.mark.case("S73")
@pytest.mark.parametrize("name", GOLDENS["models"])
def test_a_real_model_has_the_reference_ids(name):
    golden, tokenizer = GOLDENS["models"][name], Tokenizer.from_gguf(real_model(name))
    parse = golden["parse_special"]
    found = [tokenizer.encode(text, add_bos=False, parse_special=parse) for text in TEXTS]
    assert found == golden["ids"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_the_ids_and_text_of_its_own_library(name):
    folder = GOLDEN / "tiny" / name
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Tokenizer.from_directory(folder)
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False, parse_special=True) == ids
        assert ours.decode(ids) == library.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == library.decode(
            ids, skip_special_tokens=False
        )
    assert ours.vocab_size == library.get_vocab_size()


@pytest.mark.parametrize("name", TINY)
def test_a_long_text_has_the_ids_that_its_library_gives_a_short_one(name):
    text = "".join(TEXTS[:-1])
    text += " ".join([text] * (1 + 2 * LONG_TEXT // len(text)))
    tokenizer = TOKENIZERS[name]
    expected = tokenizer._encoder._bpe.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_bos=False) == expected


# --- ids to text


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "tekken"])
@quick
@given(text=st.text() | st.sampled_from(TEXTS))
def test_byte_level_text_survives(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("name", [PREFIXED, PLAIN])
@quick
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_text_survives_without_its_prefix_space(name, text):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prefix_space_is_taken_away_once_and_only_at_the_beginning():
    tokenizer = TOKENIZERS[PREFIXED]
    ids = tokenizer.encode("  hello", add_bos=False)
    assert tokenizer.prefix_space
    assert tokenizer.decode(ids) == "  hello"
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"   hello"
    assert tokenizer.decode([*tokenizer.encode("a"), *ids]) == "a   hello"


@pytest.mark.case("V40", "S46")
def test_parts_of_a_character_are_bytes_and_decode_to_one_replacement():
    for tokenizer in (GPT2, TOKENIZERS[PLAIN]):
        ids = tokenizer.encode("\U00010348", add_bos=False)
        assert len(ids) > 1
        assert b"".join(map(tokenizer.token_bytes, ids)) == "\U00010348".encode()
        assert tokenizer.decode(ids[:-1]) == "\ufffd"
    lone = TOKENIZERS[PLAIN].encode("\U00010348", add_bos=False)[0]
    assert TOKENIZERS[PLAIN].token_text(lone) == "<0xF0>"
    assert TOKENIZERS[PLAIN].token_bytes(lone) == b"\xf0"


def test_special_tokens_are_skipped_or_shown():
    ids = GPT2.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert GPT2.decode(ids) == "hi"
    assert GPT2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_an_ordinary_token_named_for_padding_stays_text():
    ordinary = GPT2.encode("!")[0]
    keys = metadata("gpt-2", padding_token_id=ordinary, unknown_token_id=ordinary)
    tokenizer = Tokenizer.from_gguf(keys)
    assert tokenizer.decode(tokenizer.encode("a!")) == "a!"


@pytest.mark.parametrize("token", [-1, 700, 1 << 40])
def test_an_id_outside_the_vocabulary_is_a_bad_request(token):
    with pytest.raises(InvalidParameterError, match="between 0 and 699"):
        GPT2.decode([token])


@pytest.mark.parametrize("parse", [False, True])
def test_a_lone_surrogate_is_a_bad_request(parse):
    with pytest.raises(BadRequestError, match="lone surrogate"):
        GPT2.encode("a\ud800", parse_special=parse)


def test_bytes_of_more_tokens_than_are_kept_stay_right(tmp_path):
    texts = [f"<{number}>" for number in range(3 * _NUM_KEPT)]
    library = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer = Tokenizer.from_directory(write_folder(tmp_path, library))
    everything = range(len(texts))
    for ids in (everything, reversed(everything)):
        assert all(tokenizer.token_bytes(i) == texts[i].encode() for i in ids)
    assert tokenizer._kept_bytes.cache_info().currsize == _NUM_KEPT


def test_an_id_between_others_that_has_no_token_has_no_text(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "é": 7, "c": 3}, []))
    tokenizer = Tokenizer.from_directory(write_folder(tmp_path, library))
    assert [*map(tokenizer.token_text, range(8))] == ["a", "", "", "c", "", "", "", "é"]
    assert tokenizer.token_bytes(5) == b""
