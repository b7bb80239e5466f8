"""From a model reference to its numbers and named tensors, or to one line that says why not."""

import json

import pytest

from octavo import LLM
from octavo.engine.load import open_model, read_config
from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tests.engine.starting import FEW, refusal
from tests.engines import TINY


@pytest.fixture
def copied(tmp_path):
    """A copy of the tiny Llama that a test may spoil."""
    for path in (TINY / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir()))
def test_every_tiny_model_opens_with_its_numbers_and_its_tokenizer(name):
    files = open_model(str(TINY / name))
    assert files.config == read_config(str(TINY / name))
    assert files.path.name == name
    assert files.tokenizer(False) is not None
    assert len(files.source.tensors) > 0


def test_of_a_directory_only_the_config_is_read_for_its_numbers(copied):
    expected = read_config(str(copied))
    for path in copied.iterdir():
        if path.name != "config.json":
            path.write_text("damaged")
    assert read_config(str(copied)) == expected


def test_a_weight_file_stands_for_its_directory():
    with LLM(str(TINY / "llama" / "model.safetensors"), **FEW) as llm:
        assert llm.engine.intake.vocab_size == 300


class TestBadModels:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (None, "has no config.json"),
            ("", "not readable as JSON"),
            ("{", "not readable as JSON"),
            ("[1]", "holds a list"),
            ("[" * 100_000, "not readable as JSON"),
            ("\ud800".encode("utf-8", "surrogatepass"), "not readable as JSON"),
        ],
    )
    def test_a_config_that_is_missing_or_no_object(self, copied, content, says):
        path = copied / "config.json"
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert says in refusal(copied, ModelFileError)

    def test_an_unknown_architecture(self, copied):
        change(copied / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
        assert "amba" in refusal(copied, UnsupportedModelError)

    def test_a_damaged_generation_config_or_tokenizer(self, copied):
        (copied / "generation_config.json").write_text("no")
        assert "generation_config.json" in refusal(copied, ModelFileError)
        (copied / "generation_config.json").unlink()
        (copied / "tokenizer.json").write_text("no")
        assert "tokenizer.json" in refusal(copied, ModelFileError)

    def test_weights_of_another_size_than_the_config_says(self, copied):
        change(copied / "config.json", intermediate_size=96)
        refusal(copied, ModelFileError)

    def test_a_model_that_is_nowhere(self, tmp_path):
        assert "smollm2-135m" in refusal("smolm2-135m", ModelNotFoundError)
        refusal(tmp_path / "nowhere", ModelNotFoundError)
        refusal(tmp_path, ModelFileError)


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
