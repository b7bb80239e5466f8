"""Small networks of every family, without weights."""

from octavo.models.registry import build_program, read_huggingface_config
from octavo.program.program import Program

FAMILIES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Gemma3ForCausalLM": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
}


def network(architecture: str = "LlamaForCausalLM", **overrides: object) -> Program:
    values = {
        "architectures": [architecture],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    return build_program(read_huggingface_config(values | FAMILIES[architecture] | overrides))
