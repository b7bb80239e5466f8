"""Llama and its kin: Mistral, Qwen 2 and Qwen 3.

Decides their configuration, program and tensor names. They differ in options alone: biases, norms
of queries and keys, sliding windows and rotary scaling.
Invariant: rows of q and k are in "rotate half" order, whatever order the file has.
"""

from dataclasses import replace

from octavo.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    ModelConfig,
    layer_types,
    read_gguf,
    read_huggingface,
)
from octavo.models.fields import Fields
from octavo.models.layers import attention, gated_mlp, logits
from octavo.models.origins import Family, Names, Origin, tensor_name
from octavo.models.source import TensorSource
from octavo.program.program import Builder, Program

NAMES = {
    "embedding": Names("model.embed_tokens", "token_embd"),
    "attention_norm": Names("input_layernorm", "attn_norm"),
    "q": Names("self_attn.q_proj", "attn_q"),
    "k": Names("self_attn.k_proj", "attn_k"),
    "v": Names("self_attn.v_proj", "attn_v"),
    "o": Names("self_attn.o_proj", "attn_output"),
    "q_norm": Names("self_attn.q_norm", "attn_q_norm"),
    "k_norm": Names("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": Names("post_attention_layernorm", "ffn_norm"),
    "gate": Names("mlp.gate_proj", "ffn_gate"),
    "up": Names("mlp.up_proj", "ffn_up"),
    "down": Names("mlp.down_proj", "ffn_down"),
    "final_norm": Names("model.norm", "output_norm"),
    "lm_head": Names("lm_head", "output"),
}


def _read_huggingface(fields: Fields) -> ModelConfig:
    config = _with_windows(read_huggingface(fields), fields)
    match fields.architecture:
        case "Qwen2ForCausalLM":
            return replace(config, qkv_bias=True)
        case "MistralForCausalLM":
            return config
    attention_bias = fields.flag("attention_bias")
    return replace(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=fields.architecture == "Qwen3ForCausalLM",
    )


def _with_windows(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Give each layer its window: all of Mistral's, and of Qwen's those that its file says."""
    slides = _slides(fields, len(config.layers))
    if not any(slides):
        return config
    window = fields.integer("sliding_window", MAX_CONTEXT, 4096)
    layers = zip(config.layers, slides, strict=True)
    return replace(
        config, layers=tuple(layer._replace(window=window) if s else layer for layer, s in layers)
    )


def _slides(fields: Fields, num_layers: int) -> list[bool]:
    if fields.architecture == "MistralForCausalLM":
        # Hugging Face gives a window to a file that does not say; null says that there is none.
        said = fields.values.get("sliding_window", "unsaid")
        return [said is not None] * num_layers
    if fields.architecture == "LlamaForCausalLM" or not fields.flag("use_sliding_window"):
        return [False] * num_layers
    listed = layer_types(fields, num_layers)
    first = fields.integer("max_window_layers", MAX_LAYERS, 28, low=0)
    return listed or [index >= first for index in range(num_layers)]


def _read_gguf(fields: Fields, source: TensorSource) -> ModelConfig:
    config = read_gguf(fields, source)
    if fields.get("attention.sliding_window") is None:
        return config
    window = fields.integer("attention.sliding_window", MAX_CONTEXT)
    layers = tuple(layer._replace(window=window) for layer in config.layers)
    return replace(config, layers=layers)


def _build(config: ModelConfig) -> Program:
    b = Builder()
    x = b.embed("embedding", config.vocab_size, config.hidden_size)
    for index in range(len(config.layers)):
        h = b.norm(x, f"layers.{index}.attention_norm", config.norm_eps)
        x, h = attention(b, x, h, config, index)
        x = b.add(x, h)
        h = b.norm(x, f"layers.{index}.mlp_norm", config.norm_eps)
        x = b.add(x, gated_mlp(b, h, config, index))
    return logits(b, x, config)


def _origin(config: ModelConfig, parameter: str) -> Origin:
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    stem = parameter.split(".")[-1].removesuffix("_bias")
    interleaved = heads.get(stem, 0) if config.architecture == "llama" else 0
    return Origin(tensor_name(config, parameter, NAMES), interleaved_heads=interleaved)


FAMILY = Family(_read_huggingface, _read_gguf, _build, _origin)
