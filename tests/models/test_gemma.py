import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.registry import WeightReader, build_program, origins
from octavo.program.ops import Attention, Embed
from tests.models.sources import ArraySource, from_gguf, from_huggingface, weights_of

GEMMA = "Gemma3ForCausalLM"
QK_NORM = ArraySource({"blk.0.attn_q_norm.weight": np.ones(8, np.float32)})


def gemma_gguf(**overrides):
    settings = {"attention__sliding_window": 16, "rope__freq_base": 1e6} | overrides
    return from_gguf("gemma3", QK_NORM, **settings)


def windows(config):
    program = build_program(config)
    return [op.window for op in program.operations if isinstance(op, Attention)]


@pytest.mark.parametrize(
    "config",
    [from_huggingface(GEMMA, num_hidden_layers=13), gemma_gguf(block_count=13)],
    ids=["huggingface", "gguf"],
)
def test_every_sixth_layer_sees_everything_at_its_own_pace(config):
    layers = config.layers
    assert windows(config) == [16, 16, 16, 16, 16, None] * 2 + [16]
    assert {layer.frequencies[1] for layer in layers if layer.window} == {
        float(np.float32(10_000**-0.25))
    }
    assert {layer.frequencies[1] for layer in layers if not layer.window} == {
        float(np.float32(1_000_000**-0.25))
    }


def test_layer_types_have_the_last_word():
    types = ["full_attention", "sliding_attention"]
    assert windows(from_huggingface(GEMMA, layer_types=types)) == [None, 16]


@pytest.mark.parametrize(
    "types", [["full_attention"], ["full_attention", "linear"], "full", [1, 2]]
)
def test_impossible_layer_types_are_refused(types):
    with pytest.raises(ModelFileError, match="layer_types is"):
        from_huggingface(GEMMA, layer_types=types)


def test_window_is_needed_where_layers_slide():
    with pytest.raises(ModelFileError, match="sliding_window is missing"):
        from_huggingface(GEMMA, sliding_window=None)


def test_scaling_slows_global_layers_alone():
    scaling = {"rope_type": "linear", "factor": 8.0}
    plain = from_huggingface(GEMMA, num_hidden_layers=6)
    scaled = from_huggingface(GEMMA, num_hidden_layers=6, rope_scaling=scaling)
    assert scaled.layers[:5] == plain.layers[:5]
    expected = tuple(frequency / 8 for frequency in plain.layers[5].frequencies)
    assert scaled.layers[5].frequencies == expected
    metadata = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    gguf = gemma_gguf(block_count=6, **metadata)
    assert gguf.layers == scaled.layers


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("bfloat16", 25.25), ("float16", 25.296875), ("float32", float(np.float32(640**0.5)))],
)
def test_embedding_scale_is_rounded_to_the_stored_type(dtype, scale):
    config = from_huggingface(GEMMA, hidden_size=640, torch_dtype=dtype)
    assert config.embedding_scale == scale
    embed = build_program(config).operations[0]
    assert isinstance(embed, Embed)
    assert embed.scale == scale


def test_norms_are_stored_from_one_by_hugging_face_alone():
    config = from_huggingface(GEMMA)
    source = weights_of(config)
    read = WeightReader(config, build_program(config), source)
    stored = source.arrays["model.layers.1.post_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(read("layers.1.post_mlp_norm"), stored + np.float32(1))
    stored = source.arrays["model.layers.1.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(read("layers.1.k_norm"), stored + np.float32(1))
    stored = source.arrays["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(read("layers.1.down"), stored)
    gguf = gemma_gguf()
    found = origins(gguf, build_program(gguf).parameters)
    assert {origin.add for origin in found.values()} == {0.0}


def test_gguf_names_are_the_converter_s():
    found = origins(gemma_gguf(), ["layers.1.mlp_norm", "layers.1.post_mlp_norm", "final_norm"])
    assert [origin.tensor for origin in found.values()] == [
        "blk.1.ffn_norm.weight",
        "blk.1.post_ffw_norm.weight",
        "output_norm.weight",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
    ],
)
def test_options_of_other_gemmas_are_refused(changes):
    with pytest.raises(UnsupportedModelError, match="Octavo does not support"):
        from_huggingface(GEMMA, **changes)


def test_gguf_without_norms_of_queries_is_refused():
    with pytest.raises(UnsupportedModelError, match="no norms of queries and keys"):
        from_gguf("gemma3", attention__sliding_window=16)


def test_scores_are_scaled_by_the_query_scalar():
    assert from_huggingface(GEMMA, query_pre_attn_scalar=64).attention_scale == 0.125
    assert gemma_gguf().attention_scale == 8**-0.5
    largest = gemma_gguf(block_count=62, embedding_length=5376, attention__head_count=32)
    assert largest.attention_scale == 168**-0.5  # as published for the 27B model
