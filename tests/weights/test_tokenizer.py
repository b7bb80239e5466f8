"""Ids against other implementations, no tokens out of user text, damaged files refused."""

import copy
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from octavo.errors import (
    BadRequestError,
    InvalidParameterError,
    ModelFileError,
    ModelNotFoundError,
    OctavoError,
    UnsupportedModelError,
)
from octavo.weights.encoder import LONG_TEXT
from octavo.weights.fetch import cached_path
from octavo.weights.gguf import open_gguf
from octavo.weights.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDENS = json.loads((GOLDEN / "tokenizers.json").read_text())
TEXTS, TINY = GOLDENS["texts"], GOLDENS["tiny"]
BYTE_LEVEL = [name for name in TINY if "sentencepiece" not in name]
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("tiny/*/tokenizer.json"))
PREFIXED, PLAIN = "sentencepiece with a prefix space", "sentencepiece without"
quick = settings(deadline=None, max_examples=60)


def metadata(name: str, **changes: object) -> dict[str, object]:
    """A tiny model's metadata with keys changed; None takes a key away."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    merged = {**copy.deepcopy(TINY[name]["metadata"]), **keys}
    return {key: value for key, value in merged.items() if value is not None}


TOKENIZERS = {name: Tokenizer.from_gguf(metadata(name)) for name in TINY}
GPT2 = TOKENIZERS["gpt-2"]


def real_model(name: str) -> dict[str, object]:
    path = cached_path(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache: octavo pull {name}")
    with open_gguf(path) as file:
        return dict(file.metadata)


# --- the same ids as other implementations


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


# --- reading what only encoding needs later


@pytest.mark.parametrize("name", TINY)
def test_a_deferred_tokenizer_reads_its_metadata_again_at_the_first_text(name):
    reads = []

    def reopen():
        reads.append(name)
        return metadata(name)

    eager, deferred = TOKENIZERS[name], Tokenizer.from_gguf(metadata(name), reopen=reopen)
    everything = range(eager.vocab_size)
    assert [*map(deferred.token_bytes, everything)] == [*map(eager.token_bytes, everything)]
    assert [*map(deferred.token_text, everything)] == [*map(eager.token_text, everything)]
    assert (deferred.eos_ids, deferred.special_ids) == (eager.eos_ids, eager.special_ids)
    assert not reads
    for text in TEXTS[:-1]:
        for parse in (False, True):
            found = deferred.encode(text, parse_special=parse)
            assert found == eager.encode(text, parse_special=parse)
    assert reads == [name]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_deferred_folder_is_read_again_at_the_first_text(name):
    folder = GOLDEN / "tiny" / name
    eager, deferred = (Tokenizer.from_directory(folder, deferred=d) for d in (False, True))
    assert [*map(deferred.encode, TEXTS[:-1])] == [*map(eager.encode, TEXTS[:-1])]


def test_a_deferred_tokenizer_whose_file_was_damaged_since_says_so():
    reads = iter([metadata("gpt-2", merges=["no such"]), metadata("gpt-2")])
    tokenizer = Tokenizer.from_gguf(metadata("gpt-2"), reopen=lambda: next(reads))
    with pytest.raises(ModelFileError, match="damaged"):
        tokenizer.encode("text")
    assert tokenizer.encode("text") == GPT2.encode("text")


def test_threads_that_encode_first_read_once():
    reads = []
    tokenizer = Tokenizer.from_gguf(
        metadata("gpt-2"), reopen=lambda: reads.append(1) or metadata("gpt-2")
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, ["some text"] * 32))
    assert found == [GPT2.encode("some text")] * 32
    assert len(reads) == 1


@pytest.mark.parametrize("parse_special", [False, True])
def test_other_threads_run_while_a_long_text_is_encoded(parse_special):
    """With switching as good as off, another thread gets on only where the library lets it."""
    start, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: start.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        start.set()
        for _ in range(50):  # once would do, were the machine idle
            GPT2.encode("some words " * 5_000, parse_special=parse_special)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


@pytest.mark.parametrize("name", TINY)
def test_a_long_text_has_the_ids_that_its_library_gives_a_short_one(name):
    text = "".join(TEXTS[:-1])
    text += " ".join([text] * (1 + 2 * LONG_TEXT // len(text)))
    tokenizer = TOKENIZERS[name]
    expected = tokenizer._encoder._bpe.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_bos=False) == expected


def test_an_id_between_others_that_has_no_token_has_no_text(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "é": 7, "c": 3}, []))
    tokenizer = Tokenizer.from_directory(write_folder(tmp_path, library))
    assert [*map(tokenizer.token_text, range(8))] == ["a", "", "", "c", "", "", "", "é"]
    assert tokenizer.token_bytes(5) == b""


# --- special tokens in text


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


# --- metadata that is wrong


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


# --- the cache of derived merges


def test_a_damaged_cache_entry_is_rebuilt(tmp_path):
    keys, text = metadata(PLAIN), TEXTS[10]
    expected = Tokenizer.from_gguf(keys, cache=tmp_path).encode(text)
    (entry,) = tmp_path.iterdir()
    sound = entry.read_bytes()
    for damaged in (b"", sound[:-1], sound[:40], b"x" * len(sound), sound[:-4] + b"\xff" * 4):
        entry.write_bytes(damaged)
        assert Tokenizer.from_gguf(keys, cache=tmp_path).encode(text) == expected
        assert entry.read_bytes() == sound
    assert list(tmp_path.iterdir()) == [entry]


def test_other_scores_have_their_own_cache_entry(tmp_path):
    scores = TINY[PLAIN]["metadata"]["tokenizer.ggml.scores"]
    Tokenizer.from_gguf(metadata(PLAIN), cache=tmp_path)
    Tokenizer.from_gguf(metadata(PLAIN, scores=[-s for s in scores]), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert Tokenizer.from_gguf(metadata(PLAIN), cache=blocked / "sub").encode("a")


# --- folders


def write_folder(folder: Path, library: tokenizers.Tokenizer, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def small_library() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<s>", "</s>"])  # 256, 257
    library.add_tokens(["<tool>"])  # 258, after the special ones
    library.add_special_tokens(["<end>"])  # 259
    return library


def test_added_tokens_keep_their_ids_when_special_ones_are_guarded(tmp_path):
    tokenizer = Tokenizer.from_directory(write_folder(tmp_path, small_library()))
    assert tokenizer.encode("<tool><end>", parse_special=True) == [258, 259]
    assert tokenizer.encode("<tool>") == [258]
    assert not {256, 257, 259}.intersection(tokenizer.encode("<s></s><end>"))
    assert tokenizer.token_text(259) == "<end>"
    assert tokenizer.vocab_size == 260


@pytest.mark.case("S22")
def test_bos_comes_from_the_config_or_the_post_processor(tmp_path):
    library = small_library()
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    plain = Tokenizer.from_directory(write_folder(tmp_path, library, tokenizer_config=names))
    assert (plain.bos_id, plain.eos_ids, plain.add_bos) == (256, (257,), False)

    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    folder = write_folder(tmp_path, library)
    assert Tokenizer.from_directory(folder).encode("a")[0] == 256
    write_folder(tmp_path, library, tokenizer_config={**names, "add_bos_token": False})
    assert 256 not in Tokenizer.from_directory(folder).encode("a")


def test_ends_come_from_the_generation_config(tmp_path):
    names = {"eos_token": "</s>"}
    folder = write_folder(
        tmp_path,
        small_library(),
        special_tokens_map=names,
        generation_config={"eos_token_id": [259, 257]},
    )
    assert Tokenizer.from_directory(folder).eos_ids == (257, 259)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1000}')
    with pytest.raises(ModelFileError, match="end tokens"):
        Tokenizer.from_directory(folder)


@pytest.mark.case("S21")
def test_chat_templates_come_from_the_config_or_files_of_their_own(tmp_path):
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write_folder(tmp_path, small_library(), tokenizer_config={"chat_template": listed})
    assert Tokenizer.from_directory(folder).chat_templates == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("c")
    assert Tokenizer.from_directory(folder).chat_template == "c"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_metaspace_prefix_goes_where_the_library_puts_it(scheme, tmp_path):
    pieces = ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b"]
    library = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "b")])
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    library.add_special_tokens(["<s>"])
    tokenizer = Tokenizer.from_directory(write_folder(tmp_path, library))
    for text in ("ab", " ab", "<s>ab", "a<s>b<s> b", "<s>"):
        ids = library.encode(text).ids
        assert tokenizer.encode(text, parse_special=True) == ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_truncation_and_padding_saved_in_a_file_do_not_cut_prompts(tmp_path):
    library = small_library()
    library.enable_truncation(2)
    library.enable_padding(length=9)
    folder = write_folder(tmp_path, library)
    assert len(Tokenizer.from_directory(folder).encode("abcd")) == 4


def test_a_normaliser_of_the_file_is_applied(tmp_path):
    library = small_library()
    library.normalizer = normalizers.Lowercase()
    assert (
        Tokenizer.from_directory(write_folder(tmp_path, library)).decode(
            Tokenizer.from_directory(tmp_path).encode("ABC")
        )
        == "abc"
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("not json", ModelFileError),
        ("[1]", ModelFileError),
        ("[" * 100_000, ModelFileError),
        ("{}", ModelFileError),
        ({"model": {"type": "Unigram", "vocab": []}}, UnsupportedModelError),
        ({"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}, ModelFileError),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, ModelFileError),
        ({"model": {"type": "BPE", "vocab": {"a": 1, "b": 1}, "merges": []}}, ModelFileError),
        ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["a"]]}}, ModelFileError),
        ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["a", "b"]]}}, ModelFileError),
        ({"added_tokens": [{"content": "x"}]}, ModelFileError),
        ({"added_tokens": [{"content": "x", "id": 1 << 60}]}, ModelFileError),
        ({"pre_tokenizer": {"type": "NoSuchThing"}}, ModelFileError),
        ({"pre_tokenizer": "words"}, ModelFileError),
        ({"normalizer": {"type": "Sequence", "normalizers": 7}}, ModelFileError),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": 7}}, ModelFileError),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(change, error, tmp_path):
    folder = write_folder(tmp_path, small_library())
    path = folder / "tokenizer.json"
    if isinstance(change, dict):
        change = json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(change)
    with pytest.raises(error) as caught:
        Tokenizer.from_directory(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_importing_the_module_imports_no_tokenizer_library():
    check = "import sys, octavo.weights.tokenizer; print('tokenizers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
