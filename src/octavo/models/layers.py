"""The parts that families have in common, as operations.

Decides the names of parameters: `layers.N.` before those of a layer, `_bias` after a weight's name.
Knows no file. Invariant: values between parts have the hidden size.
"""

from octavo.models.config import ModelConfig
from octavo.program.ops import Value
from octavo.program.program import Builder, KVGroup, Program


def attention(
    b: Builder, stream: Value, x: Value, config: ModelConfig, index: int
) -> tuple[Value, Value]:
    """Project x to queries, keys and values, turn them, attend, and project back.

    Returns the residual stream and what is to be added to it, in the last layer of the rows that
    need logits alone: nobody attends to the others any more.
    """
    at, head_dim, bias = f"layers.{index}.", config.head_dim, config.qkv_bias
    layer = config.layers[index]
    q = b.linear(x, f"{at}q", config.num_heads * head_dim, bias=bias)
    k = b.linear(x, f"{at}k", config.num_kv_heads * head_dim, bias=bias)
    v = b.linear(x, f"{at}v", config.num_kv_heads * head_dim, bias=bias)
    if config.qk_norm:
        q = b.norm(q, f"{at}q_norm", config.norm_eps, config.num_heads)
        k = b.norm(k, f"{at}k_norm", config.norm_eps, config.num_kv_heads)
    q = b.rope(q, head_dim, layer.frequencies)
    k = b.rope(k, head_dim, layer.frequencies)
    out = b.attention(
        q,
        k,
        v,
        out=f"{at}attention",
        layer=index,
        head_dim=head_dim,
        scale=config.attention_scale,
        window=layer.window,
    )
    if index == len(config.layers) - 1:
        stream, out = b.select_rows(stream, f"{at}stream.selected"), b.select_rows(out)
    return stream, b.linear(out, f"{at}o", config.hidden_size, bias=config.output_bias)


def gated_mlp(b: Builder, x: Value, config: ModelConfig, index: int) -> Value:
    """Project up twice, gate one with the other, and project back."""
    at, width, bias = f"layers.{index}.", config.intermediate_size, config.mlp_bias
    gate = b.linear(x, f"{at}gate", width, bias=bias)
    up = b.linear(x, f"{at}up", width, bias=bias)
    gated = b.gated(gate, up, config.activation)
    return b.linear(gated, f"{at}down", config.hidden_size, bias=bias)


def logits(b: Builder, x: Value, config: ModelConfig) -> Program:
    """Normalise, project to the vocabulary, sample: the end of every family."""
    x = b.norm(x, "final_norm", config.norm_eps)
    weight = "embedding" if config.tied else "lm_head"
    scores = b.linear(x, weight, config.vocab_size, out="logits")
    group = KVGroup(len(config.layers), config.num_kv_heads, config.head_dim)
    return b.sample(scores, group, config.max_context)
