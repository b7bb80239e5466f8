import json

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from benchmarks.peers import models
from octavo import LLM, SamplingParams
from octavo.engine.load import open_model
from octavo.weights.fetch import cached_path
from octavo.weights.safetensors import open_safetensors


def test_bfloat16_is_the_nearest_and_ties_go_to_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1.005], np.float32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x3F81]
    assert models.to_bfloat16(values).tolist() == expected


def test_a_written_file_is_read_back_with_names_shapes_and_values(tmp_path):
    values = {"a": np.eye(3, dtype=np.float32), "b": np.full(5, 0.5, np.float32)}
    shapes = {name: value.shape for name, value in values.items()}
    models.write_bf16(tmp_path / "model.safetensors", shapes, iter(values.values()))
    with open_safetensors(tmp_path) as source:
        assert list(source.tensors) == ["a", "b"]
        for name, value in values.items():
            assert np.array_equal(source.float32(name), value)


@pytest.fixture
def small_shape(monkeypatch):
    sizes = {"HIDDEN": 64, "FFN": 128, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(models, name, size)


needs_default_model = pytest.mark.skipif(
    cached_path("smollm2-135m") is None, reason="the default model is not on this machine"
)


@pytest.mark.real
@needs_default_model
def test_the_random_model_and_its_checkpoint_answer_alike(tmp_path, small_shape):
    """Every value of Q8_0 with this scale is a bfloat16 but for rounding: texts must agree."""
    source = models.gguf_path(models.LARGE, tmp_path)
    folder = models.checkpoint_path(models.LARGE, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4)
    tokens = []
    for model in (source, folder):
        with LLM(
            str(model), executor="reference", kv_cache_dtype="float32", kv_cache_memory_bytes=10**6
        ) as llm:
            output = llm.generate("Hello", params, use_tqdm=False)[0].outputs[0]
            tokens.append(output.token_ids)
    assert tokens[0] == tokens[1]
    assert models.pool_tokens(models.LARGE, 2560, tmp_path) == 10  # 2 layers of 2 x 2 x 16 x 2


@pytest.mark.real
@needs_default_model
def test_the_checkpoints_tokenizer_is_the_models(tmp_path, small_shape):
    folder = models.checkpoint_path(models.LARGE, tmp_path)
    tokenizer = open_model("smollm2-135m").tokenizer(False)
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Hello wörld, it's 2024!\n\n  def f(x): 🙂"
    ids = library.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text)
    assert library.decode(ids) == text
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 500_000.0


def test_a_file_that_was_not_written_to_its_end_is_not_there(tmp_path):
    target = tmp_path / "models" / "file"

    def fail(scratch):
        scratch.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._made(target, fail)
    assert not target.exists()
    models._made(target, lambda scratch: scratch.write_text("whole"))
    assert target.read_text() == "whole"
    models._made(target, fail)  # it is there: nothing is written
