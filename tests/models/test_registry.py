import json
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.registry import (
    GGUF,
    HUGGINGFACE,
    WeightReader,
    build_program,
    origins,
    read_gguf_config,
    read_huggingface_config,
)
from tests.models.sources import (
    ArraySource,
    from_gguf,
    from_huggingface,
    gguf,
    huggingface,
    weights_of,
)

TINY = Path(__file__).parents[1] / "golden" / "tiny"
NAMES = sorted(path.parent.name for path in TINY.glob("*/logits.npz"))


@pytest.mark.parametrize("name", NAMES)
def test_old_and_new_spelling_are_the_same_model(name):
    old, new = (
        read_huggingface_config(json.loads((TINY / name / file).read_text()))
        for file in ("config.transformers4.json", "config.json")
    )
    assert old == new


@pytest.mark.parametrize("architecture", HUGGINGFACE)
def test_parameters_are_read_in_the_program_s_shapes(architecture):
    config = from_huggingface(architecture)
    program = build_program(config)
    read = WeightReader(config, program, weights_of(config))
    for name, shape in program.parameters.items():
        values = read(name)
        assert (values.shape, values.dtype) == (shape, np.float32)


@pytest.mark.parametrize(
    ("architectures", "problem"),
    [
        (["LlamaForCasualLM"], "'LlamaForCasualLM'; it knows .*Did you mean 'LlamaForCausalLM'"),
        (["T5ForConditionalGeneration"], "does not know the architecture 'T5For.*it knows Llama"),
    ],
)
def test_unknown_architecture_lists_the_known_ones(architectures, problem):
    with pytest.raises(UnsupportedModelError, match=problem):
        read_huggingface_config(huggingface(architectures=architectures))


@pytest.mark.parametrize("architectures", [None, [], "Llama", [3], [None], {}])
def test_configuration_without_an_architecture_is_damaged(architectures):
    with pytest.raises(ModelFileError, match="must name the model's architecture"):
        read_huggingface_config(huggingface(architectures=architectures))


@pytest.mark.parametrize("name", ["mamba", "gemma2", ""])
def test_unknown_gguf_architecture_lists_the_known_ones(name):
    with pytest.raises(UnsupportedModelError, match=f"it knows {', '.join(GGUF)}"):
        read_gguf_config({"general.architecture": name}, ArraySource())


@pytest.mark.parametrize("architecture", HUGGINGFACE)
def test_missing_tensor_is_named_with_its_shape(architecture):
    config = from_huggingface(architecture)
    source = weights_of(config)
    del source.arrays["model.layers.1.mlp.up_proj.weight"]
    expected = r"no tensor model\.layers\.1\.mlp\.up_proj\.weight, .* needs as \(40, 24\)"
    with pytest.raises(ModelFileError, match=expected):
        WeightReader(config, build_program(config), source)


@pytest.mark.parametrize("shape", [(24, 40), (40,), (40, 24, 1), (), (41, 24)])
def test_tensor_of_another_shape_is_named_with_both_shapes(shape):
    config = from_huggingface()
    source = weights_of(config)
    source.arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros(shape, np.float32)
    with pytest.raises(ModelFileError) as caught:
        WeightReader(config, build_program(config), source)
    assert f"up_proj.weight is {shape}, but" in str(caught.value)
    assert "needs (40, 24)" in str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.experts.0.w1.weight",
    ],
)
def test_tensor_of_a_layer_that_would_be_ignored_is_refused(tensor):
    config = from_huggingface()
    source = weights_of(config)
    source.arrays[tensor] = np.zeros(3, np.float32)
    with pytest.raises(UnsupportedModelError, match=tensor.replace(".", r"\.")):
        WeightReader(config, build_program(config), source)


@pytest.mark.parametrize(
    "tensor", ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision.patch.weight"]
)
def test_tensor_that_says_nothing_about_the_layers_is_tolerated(tensor):
    config = from_huggingface()
    source = weights_of(config)
    source.arrays[tensor] = np.zeros(3, np.float32)
    assert WeightReader(config, build_program(config), source)("final_norm").shape == (24,)


def test_tied_embedding_is_read_for_both_ends():
    config = from_huggingface(tie_word_embeddings=True)
    found = origins(config, build_program(config).parameters)
    assert found["embedding"].tensor == "model.embed_tokens.weight"
    assert "lm_head" not in found
    untied = from_huggingface(tie_word_embeddings=False)
    assert origins(untied, ["lm_head"])["lm_head"].tensor == "lm_head.weight"


HOSTILE = {
    "num_hidden_layers": ("block_count", [0, -1, 2**31, 1025, 2.5, "2", True, [2]]),
    "hidden_size": ("embedding_length", [0, -24, 2**40, "24", None]),
    "intermediate_size": ("feed_forward_length", [0, -1, 2**40, None]),
    "num_attention_heads": ("attention.head_count", [0, -4, 2**20, [4, 4], None]),
    "num_key_value_heads": ("attention.head_count_kv", [0, -2, 2**20, [2, 2]]),
    "head_dim": ("attention.key_length", [0, -8, 2**20]),
    "vocab_size": ("vocab_size", [0, -1, 2**32, None]),
    "max_position_embeddings": ("context_length", [0, -1, 2**40, None]),
}
HOSTILE_VALUES = [(name, key, value) for name, (key, values) in HOSTILE.items() for value in values]


@pytest.mark.parametrize(("name", "key", "value"), HOSTILE_VALUES)
def test_impossible_number_is_named_with_its_value(name, key, value):
    shown = "missing" if value is None else repr(value)
    with pytest.raises(ModelFileError) as caught:
        read_huggingface_config(huggingface(**{name: value}))
    assert f"{name} is {shown}" in str(caught.value)
    with pytest.raises(ModelFileError) as caught:
        read_gguf_config(gguf(**{key: value}), ArraySource())
    assert f"llama.{key} is {shown}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 7}, "head size of 7 is odd"),
        ({"head_dim": None, "hidden_size": 26}, "hidden size of 26 cannot be parted among 4"),
        ({"num_attention_heads": 1024, "head_dim": 1024}, "1024 heads of 1024 are wider"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"hidden_act": 3}, "hidden_act is 3"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(changes, problem):
    with pytest.raises(ModelFileError, match=problem):
        from_huggingface(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_option_that_is_not_implemented_is_refused(changes):
    with pytest.raises(UnsupportedModelError, match="Octavo does not support"):
        from_huggingface(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 8},
        {"rope__scaling__type": "yarn"},
        {"rope__dimension_count": 4},
        {"attention__value_length": 16},
    ],
)
def test_gguf_option_that_is_not_implemented_is_refused(changes):
    with pytest.raises(UnsupportedModelError, match="Octavo does not support"):
        from_gguf(**changes)
