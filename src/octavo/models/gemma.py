"""Gemma 3, text only.

Decides its configuration, program and tensor names: norms before and after each part, norms of
queries and keys, five layers with a window to each without, and a scaled, tied embedding.
Invariant: norm weights are whole factors, though Hugging Face stores their distance from one.
"""

import math
from dataclasses import replace

from octavo.errors import UnsupportedModelError
from octavo.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    Layer,
    ModelConfig,
    layer_types,
    read_gguf,
    read_huggingface,
)
from octavo.models.fields import Fields
from octavo.models.layers import attention, gated_mlp, logits
from octavo.models.llama import NAMES as LLAMA_NAMES
from octavo.models.origins import Family, Names, Origin, tensor_name
from octavo.models.rope import Frequencies, frequencies, huggingface_rope
from octavo.models.source import TensorSource
from octavo.program.program import Builder, Program

NAMES = LLAMA_NAMES | {
    "post_attention_norm": Names("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": Names("pre_feedforward_layernorm", "ffn_norm"),
    "post_mlp_norm": Names("post_feedforward_layernorm", "post_ffw_norm"),
}

_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0


def _read_huggingface(fields: Fields) -> ModelConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(name)
    fields.refuse("use_bidirectional_attention", False)
    config = read_huggingface(
        fields, act="hidden_activation", default_act="gelu_pytorch_tanh", tied=True
    )
    num_layers = len(config.layers)
    slides = layer_types(fields, num_layers) or _pattern(
        fields, "sliding_window_pattern", num_layers
    )
    attention_bias = fields.flag("attention_bias")
    theta, scaling = huggingface_rope(fields, "full_attention", _GLOBAL_THETA)
    far = frequencies(config.head_dim, theta, scaling)
    theta, scaling = _local_rope(fields)
    near = frequencies(config.head_dim, theta, scaling)
    return replace(
        config,
        layers=_layers(fields, "sliding_window", slides, near, far),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=_embedding_scale(config.hidden_size, config.dtype),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


def _local_rope(fields: Fields) -> tuple[float, Fields]:
    if fields.mapping("rope_parameters"):
        return huggingface_rope(fields, "sliding_attention", _LOCAL_THETA)
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    return theta, Fields({}, fields.architecture)


def _pattern(fields: Fields, name: str, num_layers: int) -> list[bool]:
    """Return which layers have a window: all but every sixth, or what the field says."""
    pattern = fields.integer(name, MAX_LAYERS, 6)
    return [(index + 1) % pattern != 0 for index in range(num_layers)]


def _layers(
    fields: Fields, window_field: str, slides: list[bool], near: Frequencies, far: Frequencies
) -> tuple[Layer, ...]:
    window = fields.integer(window_field, MAX_CONTEXT) if any(slides) else None
    return tuple(Layer(window, near) if sliding else Layer(None, far) for sliding in slides)


def _embedding_scale(hidden_size: int, dtype: str | None) -> float:
    """Return sqrt(hidden_size), rounded to the stored type as Hugging Face does."""
    digits = {"bfloat16": 8, "float16": 11}.get(dtype or "", 24)
    mantissa, exponent = math.frexp(math.sqrt(hidden_size))
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def _read_gguf(fields: Fields, source: TensorSource) -> ModelConfig:
    """As Hugging Face's, with what every file of the family has in common left out of the file."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(name, 0.0)
    config = read_gguf(fields, source)
    if not config.qk_norm:
        raise UnsupportedModelError("This gemma3 file has no norms of queries and keys.")
    num_layers = len(config.layers)
    theta = fields.number("rope.freq_base_swa", _LOCAL_THETA)
    near = frequencies(config.head_dim, theta, Fields({}, fields.architecture))
    slides = _pattern(fields, "attention.sliding_window_pattern", num_layers)
    far = config.layers[0].frequencies
    # The 27B model alone, known by its 62 layers, divides by its hidden size per head.
    scalar = config.hidden_size / config.num_heads if num_layers == 62 else config.head_dim
    return replace(
        config,
        layers=_layers(fields, "attention.sliding_window", slides, near, far),
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        embedding_scale=_embedding_scale(config.hidden_size, None),
    )


def _build(config: ModelConfig) -> Program:
    b = Builder()
    x = b.embed("embedding", config.vocab_size, config.hidden_size, config.embedding_scale)
    for index in range(len(config.layers)):
        at, eps = f"layers.{index}.", config.norm_eps
        h = b.norm(x, f"{at}attention_norm", eps)
        x, h = attention(b, x, h, config, index)
        h = b.norm(h, f"{at}post_attention_norm", eps)
        x = b.add(x, h)
        h = b.norm(x, f"{at}mlp_norm", eps)
        h = b.norm(gated_mlp(b, h, config, index), f"{at}post_mlp_norm", eps)
        x = b.add(x, h)
    return logits(b, x, config)


def _origin(config: ModelConfig, parameter: str) -> Origin:
    name = tensor_name(config, parameter, NAMES)
    from_one = parameter.endswith("_norm") and config.naming == "huggingface"
    return Origin(name, add=1.0 if from_one else 0.0)


FAMILY = Family(_read_huggingface, _read_gguf, _build, _origin)
