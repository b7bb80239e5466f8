"""A model of a billion weights, of which nothing but its numbers exists."""

import json
from pathlib import Path

from octavo.planning.subject import Subject
from tests.program.networks import network

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def subject(dtype: str = "BF16", **overrides: object) -> Subject:
    return Subject("one billion", network(**(SHAPE | overrides)), lambda _: dtype)


def config_file(folder: Path, **overrides: object) -> Path:
    """Write a `config.json` without weights and return its folder."""
    values = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **SHAPE}
    (folder / "config.json").write_text(json.dumps(values | overrides))
    return folder
