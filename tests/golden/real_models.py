"""Greedy tokens of a published GGUF model, computed by transformers on its de-quantised weights.

Decides the prompts and how the weights are proven; knows nothing of the product. transformers'
own GGUF loader makes the model, and every parameter is compared, bit for bit, with
`gguf.quants.dequantize` undone here independently (row permutation, Gemma's one in the norms).
"""

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from prompts import LOGPROB_PROMPT, NAMED_PROMPTS
from reference import check_float64, greedy_cached
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_TOKENS = 64
TIE = 1e-3  # a smaller top-2 margin may go either way in another float32 implementation

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NORMS = {"ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def make_real(file: Path, name: str, folder: Path) -> None:
    """Write folder/NAME.json for one GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    reader = GGUFReader(file)
    check_config(model, reader)
    check_weights(model, reader)
    tokenizer = load_tokenizer(file, reader)
    prompts = [prompt_golden(model, kind, *ids_of(tokenizer, text)) for kind, text in NAMED_PROMPTS]
    check_float64(model, prompts[0]["prompt_ids"])
    margins = np.array([p["margins"] for p in prompts])
    golden = {
        "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "architecture": field(reader, "general.architecture"),
        "made_with": {package: version(package) for package in ("torch", "transformers", "gguf")},
        "num_tokens": NUM_TOKENS,
        "num_ties": int((margins < TIE).sum()),
        "prompt_logprobs": logprob_golden(model, *ids_of(tokenizer, LOGPROB_PROMPT)),
        "prompts": prompts,
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(golden))
    print(f"{name}: {golden['num_ties']} margins below {TIE}, smallest {margins.min():.1e}")


def to_json(golden: dict[str, Any]) -> str:
    """Indented JSON with every list of numbers on one line."""
    lists: list[str] = []

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inline(item) for key, item in value.items()}
        if isinstance(value, list) and isinstance(value[0], dict):
            return [inline(item) for item in value]
        if isinstance(value, list):
            lists.append(json.dumps(value))
            return f"<list {len(lists) - 1}>"
        return value

    text = json.dumps(inline(golden), indent=1, ensure_ascii=False)
    for number, line in enumerate(lists):
        text = text.replace(f'"<list {number}>"', line)
    return text + "\n"


def load_tokenizer(file: Path, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The file's tokenizer; transformers overlooks that SmolLM splits digits before words."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if field(reader, "tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if "tokenizer.chat_template" in reader.fields:
        tokenizer.chat_template = field(reader, "tokenizer.chat_template")
    return tokenizer


def ids_of(
    tokenizer: PreTrainedTokenizerFast, prompt: str | list[dict[str, str]]
) -> tuple[str, list[int]]:
    """A prompt as text and ids; messages become ChatML-like text, or plain for a base model."""
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt).input_ids
    if not tokenizer.chat_template:
        turns = [f"{m['role'].capitalize()}: {m['content']}\n" for m in prompt]
        return ids_of(tokenizer, "".join(turns) + "Assistant:")
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return text, tokenizer(text, add_special_tokens=False).input_ids


def prompt_golden(model: PreTrainedModel, kind: str, text: str, ids: list[int]) -> dict[str, Any]:
    tokens, margins = greedy_cached(model, ids, NUM_TOKENS)
    check_one_pass(model, ids, tokens, margins)
    print(f"{kind}: {len(ids)} tokens, smallest margin {margins.min():.1e}")
    return {
        "kind": kind,
        "prompt": text,
        "prompt_ids": ids,
        "tokens": tokens.tolist(),
        "margins": [float(f"{margin:.5g}") for margin in margins],
    }


def check_one_pass(
    model: PreTrainedModel, ids: list[int], tokens: np.ndarray, margins: np.ndarray
) -> None:
    """Raise unless one forward pass over prompt and tokens, without a cache, agrees."""
    all_ids = torch.tensor([[*ids, *tokens[:-1].tolist()]])
    logits = model(all_ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    wrong = (logits.argmax(-1).numpy() != tokens) & (margins > TIE)
    if wrong.any():
        raise SystemExit(f"Decoding and one pass differ at steps {np.flatnonzero(wrong)}.")


def logprob_golden(model: PreTrainedModel, text: str, ids: list[int]) -> dict[str, Any]:
    """The log-probability of each prompt token after the first, given those before it."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "prompt": text,
        "prompt_ids": ids,
        "logprobs": [float(f"{value:.7g}") for value in chosen.tolist()],
        "likeliest_ids": logprobs.argmax(-1).tolist(),
    }


def field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def check_config(model: PreTrainedModel, reader: GGUFReader) -> None:
    """Raise unless the model's configuration is what the file's metadata says."""
    config, arch = model.config, field(reader, "general.architecture")
    expected = {
        "num_hidden_layers": field(reader, f"{arch}.block_count"),
        "hidden_size": field(reader, f"{arch}.embedding_length"),
        "intermediate_size": field(reader, f"{arch}.feed_forward_length"),
        "num_attention_heads": field(reader, f"{arch}.attention.head_count"),
        "num_key_value_heads": field(reader, f"{arch}.attention.head_count_kv"),
        "rms_norm_eps": field(reader, f"{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
    }
    theta = field(reader, f"{arch}.rope.freq_base")
    default = {"rope_type": "default", "rope_theta": theta}
    if isinstance(config, Gemma3TextConfig):
        local = {"rope_type": "default", "rope_theta": 10000.0}
        expected["rope_parameters"] = {"full_attention": default, "sliding_attention": local}
        expected["sliding_window"] = field(reader, f"{arch}.attention.sliding_window")
        expected["head_dim"] = field(reader, f"{arch}.attention.key_length")
        expected["query_pre_attn_scalar"] = expected["head_dim"]
        pattern = [*["sliding_attention"] * 5, "full_attention"]
        expected["layer_types"] = (pattern * 99)[: config.num_hidden_layers]
    else:
        expected["rope_parameters"] = default
        expected["head_dim"] = field(reader, f"{arch}.rope.dimension_count")
    wrong = {k: (getattr(config, k), v) for k, v in expected.items() if getattr(config, k) != v}
    if wrong:
        raise SystemExit(f"The loaded configuration differs from the file's: {wrong}")


def expected_weights(
    reader: GGUFReader, model: PreTrainedModel
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file, de-quantised, by its Hugging Face name and in that layout."""
    config = model.config
    is_gemma = isinstance(config, Gemma3TextConfig)
    layer_names = LAYER_NAMES | (GEMMA_NORMS if is_gemma else LLAMA_NORMS)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if is_gemma and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1)
        if tensor.name in OUTER_NAMES:
            yield OUTER_NAMES[tensor.name], values
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads and not is_gemma:
            values = unpermute(values, heads[part])
        yield f"model.layers.{layer}.{layer_names[part]}.weight", values


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """From rotary pairs side by side (GGUF's Llama) to the two halves of a head."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def check_weights(model: PreTrainedModel, reader: GGUFReader) -> None:
    """Raise unless the model holds exactly the file's weights, each of them."""
    missing = dict(model.named_parameters())
    for name, values in expected_weights(reader, model):
        if not np.array_equal(missing.pop(name).numpy(), values):
            raise SystemExit(f"{name} is not what the file says.")
    if missing:
        raise SystemExit(f"The file does not hold {sorted(missing)}.")
