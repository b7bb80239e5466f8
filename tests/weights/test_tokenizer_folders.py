"""What the small files beside a `tokenizer.json` decide, and folders that are damaged."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.tokenizer import Tokenizer
from tests.weights.vocabularies import small_library, write_folder


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
