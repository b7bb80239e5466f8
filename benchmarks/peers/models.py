"""The model files that the engines read, made once in the cache from what Octavo reads.

Decides how one set of weights becomes a GGUF file and a Hugging Face folder, so that all engines
have the same. Knows no engine. Invariant: a file that is there is whole.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.work import LARGE
from octavo.engine.load import ModelFiles, open_model
from octavo.models.config import ModelConfig
from octavo.models.registry import WeightReader, build_program, origins
from octavo.weights.catalog import DEFAULT_MODEL
from octavo.weights.fetch import resolve
from octavo.weights.gguf_vocabulary import read_metadata
from octavo.weights.vocabulary import Vocabulary

Json = dict[str, Any]

# The shape of a 1B model of today; its vocabulary is the small model's.
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 2048, 8192, 16, 32, 8, 8192
# Standard deviation of the random weights, and of the integers that stand for them.
_DEVIATION, _STEPS = 0.02, 40


def gguf_path(model: str, cache: Path) -> Path:
    """Return a model's GGUF file, made if need be."""
    if model != LARGE:
        return resolve(model)
    return _made(cache / "models" / f"{model}.gguf", write_random_gguf)


def checkpoint_path(model: str, cache: Path) -> Path:
    """Return a model as a folder in the Hugging Face layout, bfloat16, made if need be."""
    source = gguf_path(model, cache)

    def write(folder: Path) -> None:
        folder.mkdir()
        write_checkpoint(open_model(str(source)), folder)

    return _made(cache / "models" / f"{model}-bf16", write)


def pool_tokens(model: str, pool_bytes: int, cache: Path) -> int:
    """Return how many tokens' keys and values of 16 bits fit into so many bytes."""
    config = open_model(str(gguf_path(model, cache))).config
    return pool_bytes // (4 * len(config.layers) * config.num_kv_heads * config.head_dim)


def _made(target: Path, write: Callable[[Path], None]) -> Path:
    """Return `target`, written beside itself first if it is not there."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{target.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.unlink(missing_ok=True)
        write(scratch)
        os.replace(scratch, target)
    return target


# --- the random model ---------------------------------------------------------------------------


def _random_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor; a matrix is (outputs, inputs)."""
    kv_width = KV_HEADS * HIDDEN // HEADS
    yield "token_embd.weight", (49_152, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_width, HIDDEN),
            "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())
    yield "output_norm.weight", (HIDDEN,)


def write_random_gguf(path: Path) -> None:
    """Write the random model, Q8_0, with the tokenizer of the default model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(49_152)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _copy_tokenizer(open_model(DEFAULT_MODEL).source.metadata, writer)  # type: ignore[attr-defined]
    for name, shape in _random_tensors():
        size = math.prod(shape) // 32 * 34 if len(shape) == 2 else shape[0] * 4
        kind = gguf.GGMLQuantizationType
        form = kind.Q8_0 if len(shape) == 2 else kind.F32
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    drawn = np.random.default_rng(0)
    for _, shape in _random_tensors():
        writer.write_tensor_data(_random_values(drawn, shape))
    writer.close()


def _copy_tokenizer(metadata: Mapping[str, Any], writer: gguf.GGUFWriter) -> None:
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def _random_values(drawn: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return ones for a norm, and for a matrix random blocks of Q8_0: a scale and 32 integers."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    blocks = np.empty((math.prod(shape) // 32, 34), np.uint8)
    blocks[:, :2] = np.array([_DEVIATION / _STEPS], np.float16).view(np.uint8)
    normal = drawn.standard_normal((len(blocks), 32), np.float32) * _STEPS
    blocks[:, 2:] = np.clip(np.rint(normal), -127, 127).astype(np.int8).view(np.uint8)
    return blocks


# --- the Hugging Face layout --------------------------------------------------------------------


def write_checkpoint(files: ModelFiles, folder: Path) -> None:
    """Write a Llama model's de-quantised weights, configuration and tokenizer into `folder`."""
    program = build_program(files.config)
    weights = WeightReader(files.config, program, files.source)
    renamed = replace(files.config, naming="huggingface", architecture="LlamaForCausalLM")
    names = {p: origin.tensor for p, origin in origins(renamed, program.parameters).items()}
    with closing(files.source):
        write_bf16(
            folder / "model.safetensors",
            {names[p]: shape for p, shape in program.parameters.items()},
            (weights(parameter) for parameter in program.parameters),
        )
        metadata = files.source.metadata  # type: ignore[attr-defined]
        vocabulary = read_metadata(metadata, None, None)
        theta = metadata["llama.rope.freq_base"]
    _write_json(folder / "config.json", llama_config(files.config, vocabulary, theta))
    _write_json(folder / "tokenizer.json", tokenizer_json(vocabulary))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary))


def write_bf16(
    path: Path, shapes: Mapping[str, tuple[int, ...]], values: Iterator[NDArray[np.float32]]
) -> None:
    """Write a safetensors file of bfloat16, one tensor in memory at a time.

    The format: the length of a JSON header in 8 bytes, the header, the numbers.
    """
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in values:
            to_bfloat16(tensor).tofile(file)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest bfloat16 of finite numbers, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def llama_config(config: ModelConfig, vocabulary: Vocabulary, theta: float) -> Json:
    """Return a `config.json` for Transformers' Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_ids[0],
    }


def tokenizer_json(vocabulary: Vocabulary) -> Json:
    """Return a byte-level BPE as the file that the tokenizers library reads."""
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token.id,
                "content": token.text,
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "special": token.special,
            }
            for token in sorted(vocabulary.added, key=lambda token: token.id)
        ],
        "normalizer": vocabulary.normalizer,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            **vocabulary.options,
            "vocab": vocabulary.vocab,
            "merges": [list(pair) for pair in vocabulary.merges()],
        },
    }


def _tokenizer_config(vocabulary: Vocabulary) -> Json:
    texts = {token.id: token.text for token in vocabulary.added}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts.get(vocabulary.bos_id) if vocabulary.bos_id is not None else None,
        "eos_token": texts.get(vocabulary.eos_ids[0]),
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.templates.get("default"),
    }


def _write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False))
