"""Weight files that exist only as arrays, and the configurations that go with them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from octavo.models.config import ModelConfig
from octavo.models.registry import build_program, origins, read_gguf_config, read_huggingface_config

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 16,
}
GGUF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}


class Info(NamedTuple):
    shape: tuple[int, ...]
    dtype: str = "F32"


class ArraySource:
    """A `TensorSource` of given arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self.arrays = dict(arrays or {})

    @property
    def tensors(self) -> dict[str, Info]:
        return {name: Info(array.shape) for name, array in self.arrays.items()}

    def float32(self, name: str) -> np.ndarray:
        return self.arrays[name].copy()

    def raw(self, name: str) -> np.ndarray:
        return self.arrays[name].view(np.uint8).reshape(-1)


def huggingface(architecture: str = "LlamaForCausalLM", **overrides: object) -> dict[str, object]:
    """A parsed config.json; an override of None leaves the field out."""
    values = {"architectures": [architecture]} | SMALL | overrides
    return {name: value for name, value in values.items() if value is not None}


def gguf(architecture: str = "llama", **overrides: object) -> dict[str, object]:
    """GGUF metadata; dots of an override's name are written as two underscores."""
    values = {GGUF_NAMES[name]: value for name, value in SMALL.items() if name in GGUF_NAMES}
    values["attention.layer_norm_rms_epsilon"] = 1e-6
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    prefixed = {f"{architecture}.{key}": v for key, v in values.items() if v is not None}
    return {"general.architecture": architecture} | prefixed


def weights_of(config: ModelConfig, seed: int = 0) -> ArraySource:
    """Random numbers for every tensor that the configuration needs."""
    program, rng = build_program(config), np.random.default_rng(seed)
    return ArraySource(
        {
            origin.tensor: rng.standard_normal(program.parameters[name]).astype(np.float32)
            for name, origin in origins(config, program.parameters).items()
        }
    )


def from_huggingface(architecture: str = "LlamaForCausalLM", **overrides: object) -> ModelConfig:
    return read_huggingface_config(huggingface(architecture, **overrides))


def from_gguf(
    architecture: str = "llama", source: ArraySource | None = None, **overrides: object
) -> ModelConfig:
    return read_gguf_config(gguf(architecture, **overrides), source or ArraySource())
