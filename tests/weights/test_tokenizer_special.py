"""No special tokens out of user text, one BOS, and every end of a reply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.weights.tokenizer import Tokenizer
from tests.weights.vocabularies import GPT2, PLAIN, PREFIXED, TINY, TOKENIZERS, metadata, quick


def special_texts(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    fragments = [t[i:j] for t in tokenizer.guarded.texts for i in (0, 1, 3) for j in (-1, None)]
    pieces = st.sampled_from([*tokenizer.guarded.texts, *fragments, " ", "\n", "<", "|>", "a"])
    return st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)


@pytest.mark.case("S73")
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", PREFIXED, PLAIN])
@quick
@given(values=st.data())
def test_text_never_becomes_a_guarded_token_unless_parsed(name, values):
    tokenizer = TOKENIZERS[name]
    text = values.draw(special_texts(tokenizer))
    ids = tokenizer.encode(text, add_bos=False)
    guarded = {t for t in tokenizer.special_ids if tokenizer.token_text(t) != "<unk>"}
    assert not guarded.intersection(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip(" ") == text.lstrip(" ")


@pytest.mark.case("S73")
def test_a_special_token_is_one_id_when_parsed_and_text_otherwise():
    assert GPT2.encode("<|im_start|>", parse_special=True) == [1]
    ids = GPT2.encode("<|im_start|>")
    assert 1 not in ids
    assert GPT2.decode(ids) == "<|im_start|>"


def test_a_token_that_is_not_special_is_found_in_any_text():
    assert GPT2.encode("<think>") == GPT2.encode("<think>", parse_special=True) == [3]
    assert GPT2.decode([3]) == "<think>"


def test_a_turn_mark_is_guarded_even_where_its_file_calls_it_normal_text():
    types = [1, 1, 1, 4, *TINY["gpt-2"]["metadata"]["tokenizer.ggml.token_type"][4:]]
    tokenizer = Tokenizer.from_gguf(metadata("gpt-2", token_type=types))
    assert 1 not in tokenizer.encode("<|im_start|>")
    assert tokenizer.encode("<|im_start|>", parse_special=True) == [1]


def test_merges_that_would_spell_a_special_token_are_left_out():
    tokens = ["<", "s", ">", "<s", "<s>", "a"]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["< s", "<s >"],
            "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 1],
        }
    )
    assert 4 not in tokenizer.encode("<s>")
    assert tokenizer.encode("<s>a", parse_special=True) == [4, 5]


def test_a_special_token_that_is_a_word_is_not_found_by_looking_words_up():
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",  # takes words that are tokens whole
            "tokenizer.ggml.tokens": ["E", "O", "EO", "EOE"],
            "tokenizer.ggml.merges": ["E O"],
            "tokenizer.ggml.token_type": [1, 1, 1, 3],
        }
    )
    assert tokenizer.encode("EOE") == [2, 0]
    assert tokenizer.encode("EOE", parse_special=True) == [3]


def test_a_mark_keeps_a_token_text_from_being_found_and_leaves_no_trace():
    text = "<|im_start|>a<\ufdd0|im_start|>"
    ids = GPT2.encode(text, parse_special=True, mark="\ufdd0")
    assert ids.count(1) == 1
    assert GPT2.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_start|>"
    assert GPT2.encode("a\ufdd0b", mark="\ufdd0") == GPT2.encode("ab")


# --- BOS and the ends


@pytest.mark.case("V43", "S22")
def test_there_is_exactly_one_bos():
    tokenizer = TOKENIZERS[PREFIXED]
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.add_bos) == (1, "<s>", True)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("<s>a", parse_special=True).count(1) == 1
    assert tokenizer.encode("<s>a").count(1) == 1  # the text's own is text
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("a", add_bos=False).count(1) == 0


@pytest.mark.case("S22")
def test_add_bos_token_false_is_honoured():
    tokenizer = Tokenizer.from_gguf(metadata(PREFIXED, add_bos_token=False))
    assert 1 not in tokenizer.encode("a")
    assert tokenizer.encode("<s>a", parse_special=True).count(1) == 1


@pytest.mark.case("S22")
@pytest.mark.parametrize("name", [PREFIXED, "llama-bpe"])
def test_without_a_bos_id_none_is_invented(name):
    tokenizer = Tokenizer.from_gguf(metadata(name, bos_token_id=None, add_bos_token=True))
    assert tokenizer.bos_id is None
    assert tokenizer.bos_token == ""
    assert tokenizer.encode("a") == tokenizer.encode("a", add_bos=False)


def test_every_end_that_the_file_names_or_its_template_writes_ends_a_reply():
    plain = metadata("gpt-2", eos_token_id=0)
    assert Tokenizer.from_gguf(plain).eos_ids == (0,)
    template = {"tokenizer.chat_template": "{{ '<|im_end|>' }}"}
    assert Tokenizer.from_gguf({**plain, **template}).eos_ids == (0, 2)
    named = Tokenizer.from_gguf(metadata("gpt-2", eos_token_id=2, eot_token_id=0))
    assert named.eos_ids == (2, 0)
    assert named.eos_token == "<|im_end|>"
    assert {0, 1, 2} == named.special_ids


@pytest.mark.case("S21")
def test_named_chat_templates_are_read():
    keys = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    tokenizer = Tokenizer.from_gguf({**metadata("gpt-2"), **keys})
    assert tokenizer.chat_template == "a"
    assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}
    assert GPT2.chat_template is None
