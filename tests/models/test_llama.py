import numpy as np
import pytest

from octavo.models.registry import WeightReader, build_program, origins, read_huggingface_config
from octavo.program.ops import Attention, RMSNorm
from tests.models.sources import ArraySource, from_gguf, from_huggingface, huggingface, weights_of

STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "lm_head": "output",
}


def converted(source: ArraySource, interleave: bool) -> ArraySource:
    """The same weights as the GGUF converter writes them (heads: 4 of q and 2 of k, each of 8)."""
    arrays = {}
    for name, values in source.arrays.items():
        if interleave and ("q_proj" in name or "k_proj" in name):
            heads = values.reshape(4 if "q_proj" in name else 2, 2, 4, -1)
            values = np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(values.shape)
        for theirs, ours in STEMS.items():
            name = name.replace(theirs, ours)
        arrays[name] = values
    return ArraySource(arrays)


@pytest.mark.parametrize(
    ("architecture", "gguf_architecture", "options"),
    [
        ("LlamaForCausalLM", "llama", {}),
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", "qwen2", {}),
        ("Qwen3ForCausalLM", "qwen3", {}),
    ],
)
def test_gguf_gives_the_program_and_weights_of_the_checkpoint(
    architecture, gguf_architecture, options
):
    config = from_huggingface(architecture, **options)
    source = weights_of(config)
    other_source = converted(source, interleave=gguf_architecture == "llama")
    other = from_gguf(gguf_architecture, other_source)
    program = build_program(config)
    assert build_program(other) == program
    ours = WeightReader(config, program, source)
    theirs = WeightReader(other, program, other_source)
    for name in program.parameters:
        np.testing.assert_array_equal(theirs(name), ours(name), err_msg=name)


def windows(config):
    program = build_program(config)
    return [op.window for op in program.operations if isinstance(op, Attention)]


@pytest.mark.parametrize(
    ("architecture", "options", "expected"),
    [
        ("LlamaForCausalLM", {}, [None, None]),
        ("MistralForCausalLM", {}, [16, 16]),
        ("MistralForCausalLM", {"sliding_window": None}, [4096, 4096]),  # absent, not null
        ("Qwen2ForCausalLM", {}, [None, None]),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, [None, 16]),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, [None, None]),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [16, None],
        ),
    ],
)
def test_windows_are_those_of_hugging_face(architecture, options, expected):
    assert windows(from_huggingface(architecture, **options)) == expected


def test_mistral_without_a_window_says_null():
    config = read_huggingface_config(huggingface("MistralForCausalLM") | {"sliding_window": None})
    assert windows(config) == [None, None]


def test_window_of_gguf_metadata_is_used():
    assert windows(from_gguf(attention__sliding_window=32)) == [32, 32]


def test_qwen3_normalises_each_head():
    program = build_program(from_huggingface("Qwen3ForCausalLM"))
    heads = [op.heads for op in program.operations if isinstance(op, RMSNorm)]
    assert heads[:4] == [1, 4, 2, 1]
    assert program.parameters["layers.0.q_norm"] == (8,)


def test_only_llama_s_queries_and_keys_are_interleaved_in_gguf():
    names = ["layers.1.q", "layers.1.k", "layers.1.v", "layers.1.q_bias"]
    found = origins(from_gguf("llama"), names)
    assert [found[name].interleaved_heads for name in names] == [4, 2, 0, 4]
    assert {o.interleaved_heads for o in origins(from_gguf("qwen2"), names).values()} == {0}
    plain = origins(from_huggingface(), names)
    assert {origin.interleaved_heads for origin in plain.values()} == {0}


def test_rotary_factors_of_gguf_divide_the_frequencies():
    factors = np.array([1.0, 1.0, 2.0, 8.0], np.float32)
    source = ArraySource({"rope_freqs.weight": factors})
    plain = from_gguf().layers[0].frequencies
    scaled = from_gguf("llama", source).layers[0].frequencies
    assert scaled == tuple(f / factor for f, factor in zip(plain, factors.tolist(), strict=True))
