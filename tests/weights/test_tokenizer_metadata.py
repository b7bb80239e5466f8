"""A GGUF file's metadata that is wrong is refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ModelFileError, OctavoError, UnsupportedModelError
from octavo.weights.tokenizer import Tokenizer
from tests.weights.vocabularies import PLAIN, TOKENIZERS, metadata, quick


@pytest.mark.case("S72")
def test_an_unknown_way_to_cut_words_is_named_and_can_be_overridden():
    keys = metadata("gpt-2", pre="smolm")
    with pytest.raises(UnsupportedModelError, match=r"'smolm'.*Did you mean 'smollm'.*llama-bpe"):
        Tokenizer.from_gguf(keys)
    ids = Tokenizer.from_gguf(keys, pre="smollm").encode("x  123")
    assert ids == TOKENIZERS["smollm"].encode("x  123")


@pytest.mark.parametrize("kind", ["bert", None, 7])
def test_an_unknown_kind_of_tokenizer_is_unsupported(kind):
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model"):
        Tokenizer.from_gguf(metadata("gpt-2", model=kind))


SPOILED = [
    ("gpt-2", {"tokens": None}),
    ("gpt-2", {"tokens": []}),
    ("gpt-2", {"tokens": "abc"}),
    ("gpt-2", {"tokens": [1, 2, 3]}),
    ("gpt-2", {"tokens": ["a", "b", "a"], "token_type": None, "eos_token_id": None}),
    ("gpt-2", {"token_type": [1]}),
    ("gpt-2", {"token_type": ["1"] * 700}),
    ("gpt-2", {"merges": ["a"]}),
    ("gpt-2", {"merges": ["a b c"]}),
    ("gpt-2", {"merges": [7]}),
    ("gpt-2", {"merges": "a b"}),
    ("gpt-2", {"merges": ["no such"]}),
    ("gpt-2", {"eos_token_id": 700}),
    ("gpt-2", {"eos_token_id": -1}),
    ("gpt-2", {"bos_token_id": 2**60}),
    ("gpt-2", {"bos_token_id": True}),
    ("gpt-2", {"unknown_token_id": "0"}),
    ("gpt-2", {"add_bos_token": "yes"}),
    (PLAIN, {"scores": None}),
    (PLAIN, {"scores": [0.0]}),
    (PLAIN, {"scores": ["x"] * 900}),
    (PLAIN, {"scores": [float("nan")] * 900}),
    (PLAIN, {"add_space_prefix": 1}),
    (PLAIN, {"token_type": [6] * 900}),
]


@pytest.mark.case("S76")
@pytest.mark.parametrize(("name", "changes"), SPOILED)
def test_damaged_metadata_is_refused_in_one_line(name, changes):
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_gguf(metadata(name, **changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.case("S76")
@pytest.mark.parametrize("spelling", ["<0x-1>", "<0x1G>", "<0x100>", "<0x>", "", "<0x0a>"])
def test_a_misspelled_byte_token_is_refused(spelling):
    keys = metadata(PLAIN)
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0x10>")] = spelling
    with pytest.raises(ModelFileError, match="byte token"):
        Tokenizer.from_gguf(keys)


junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
junk |= st.lists(st.integers(-2, 800) | st.text(max_size=5) | st.floats(), max_size=5)


@pytest.mark.case("S76")
@quick
@given(name=st.sampled_from(["gpt-2", PLAIN]), values=st.data())
def test_no_metadata_raises_anything_but_octavos_errors(name, values):
    keys = metadata(name)
    for key in values.draw(st.sets(st.sampled_from(sorted(keys)), min_size=1, max_size=3)):
        column = keys[key]
        if isinstance(column, list) and values.draw(st.booleans()):
            column[values.draw(st.integers(0, len(column) - 1))] = values.draw(junk)
        else:
            keys[key] = values.draw(junk)
    try:
        Tokenizer.from_gguf(keys).encode("hello <|im_start|> world", parse_special=True)
    except OctavoError as error:
        message = str(error)
        assert "\n" not in message
