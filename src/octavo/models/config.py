"""A model's numbers, whatever family and file they come from.

Decides which numbers are possible at all, before anything is allocated for them, and how both file
formats spell the ones that every family has. Knows no operations and no weights.

Invariant: a `ModelConfig` that exists is consistent: heads part evenly, sizes are within limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.errors import ModelFileError
from octavo.models.fields import Fields
from octavo.models.rope import frequencies, gguf_frequencies, huggingface_rope
from octavo.models.source import TensorSource

Activation = Literal["silu", "gelu_tanh"]

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 18
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 26

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Layer(NamedTuple):
    """How one layer attends: the positions it sees (None: all), and its rotary frequencies."""

    window: int | None
    frequencies: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one model. Raises `ModelFileError` if they contradict each other.

    architecture: its name in the file. naming: how the file names its tensors. max_context: most
    positions. dtype: type of the stored weights, where the file says. attention_scale,
    embedding_scale: factors of scores and embedding. Biases: of q, k, v; of o; of gate, up, down.
    """

    architecture: str
    naming: Literal["huggingface", "gguf"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    layers: tuple[Layer, ...]
    tied: bool
    attention_scale: float
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads."
            )
        if self.num_heads * self.head_dim > MAX_WIDTH:
            raise ModelFileError(
                f"{self.num_heads} heads of {self.head_dim} are wider than {MAX_WIDTH:,}."
            )


def head_dim_of(fields: Fields, name: str, hidden_size: int, num_heads: int) -> int:
    """Read the head size, by default the hidden size parted among the heads; it must be even."""
    if fields.get(name) is None and hidden_size % num_heads:
        raise ModelFileError(
            f"A hidden size of {hidden_size} cannot be parted among {num_heads} attention heads."
        )
    head_dim = fields.integer(name, MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise ModelFileError(f"A head size of {head_dim} is odd; rotary positions need pairs.")
    return head_dim


def layer_types(fields: Fields, num_layers: int) -> list[bool] | None:
    """Read `layer_types`: whether each layer has a window; None if the file does not list them."""
    types = fields.get("layer_types")
    if types is None:
        return None
    known = ("sliding_attention", "full_attention")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not all(t in known for t in types)
    ):
        raise fields.wrong("layer_types", f"a list of {num_layers}, each one of {', '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


def read_huggingface(
    fields: Fields, *, act: str = "hidden_act", default_act: str = "silu", tied: bool = False
) -> ModelConfig:
    """Read what every family's `config.json` has; all layers see everything, and have no biases.

    act: the activation's field. default_act, tied: the activation, and whether embeddings are
    tied, where the file does not say.
    """
    hidden_size = fields.integer("hidden_size", MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", MAX_HEADS)
    head_dim = head_dim_of(fields, "head_dim", hidden_size, num_heads)
    fields.refuse("partial_rotary_factor", 1)
    theta, scaling = huggingface_rope(fields)
    layer = Layer(None, frequencies(head_dim, theta, scaling))
    return ModelConfig(
        architecture=fields.architecture,
        naming="huggingface",
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", MAX_HEADS, num_heads),
        head_dim=head_dim,
        max_context=fields.integer("max_position_embeddings", MAX_CONTEXT),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=(layer,) * fields.integer("num_hidden_layers", MAX_LAYERS),
        tied=fields.flag("tie_word_embeddings", tied),
        attention_scale=head_dim**-0.5,
        activation=fields.choice(act, _ACTIVATIONS, default_act),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
    )


def read_gguf(fields: Fields, source: TensorSource) -> ModelConfig:
    """Read what every family's GGUF metadata has, and what only its tensors tell.

    Those are: whether embeddings are tied, the vocabulary where no number gives it, and biases.
    """
    hidden_size = fields.integer("embedding_length", MAX_WIDTH)
    num_heads = fields.integer("attention.head_count", MAX_HEADS)
    head_dim = head_dim_of(fields, "attention.key_length", hidden_size, num_heads)
    fields.refuse("attention.value_length", head_dim)
    fields.refuse("rope.dimension_count", head_dim)
    layer = Layer(None, gguf_frequencies(fields, source, head_dim))
    fields.refuse("expert_count", 0)
    embedding = source.tensors.get("token_embd.weight")
    num_rows = embedding.shape[0] if embedding and embedding.shape else None
    return ModelConfig(
        architecture=fields.architecture,
        naming="gguf",
        vocab_size=fields.integer("vocab_size", MAX_VOCAB, num_rows),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length", MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", MAX_HEADS, num_heads),
        head_dim=head_dim,
        max_context=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        layers=(layer,) * fields.integer("block_count", MAX_LAYERS),
        tied="output.weight" not in source.tensors,
        attention_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in source.tensors,
        output_bias="blk.0.attn_output.bias" in source.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in source.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in source.tensors,
    )
