"""Tiny random-weight checkpoints of every model family, as real `save_pretrained` directories.

Decides the configurations, the weights and a small byte-level tokenizer; knows nothing of logits.
Norms and biases are random too: their defaults of one and zero would hide a forgotten operation.
Invariant: the same versions write the same bytes on every run.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

NUM_ORDINARY_TOKENS = 296  # 256 bytes and 40 merges; the four special tokens follow
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(NUM_ORDINARY_TOKENS, NUM_ORDINARY_TOKENS + 4)
VOCAB_SIZE = NUM_ORDINARY_TOKENS + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOKENIZER_TEXT = [
    "The engine keeps the keys and values of every request in pages of a fixed size.",
    "The pages of a shared prefix are computed once, and then the others read them.",
    "A row of the output depends on that row alone, and not on the others in the batch.",
    "There is no prefill phase and no decode phase: the sequence catches up with its tokens.",
]


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint: its configuration, and how it is written."""

    name: str
    config: PreTrainedConfig
    seed: int
    prompt_lengths: tuple[int, ...] = (70, 133)
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "5GB"
    adds_bos: bool = False
    eos: int | list[int] = EOS


def common(**overrides: Any) -> dict[str, Any]:
    """Settings every family shares, with this model's own on top."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    return settings | overrides


def llama(**overrides: Any) -> LlamaConfig:
    settings = {
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return LlamaConfig(**common(**(settings | overrides)))


def llama31_rope() -> LlamaConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return llama(
        num_hidden_layers=2,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope,
    )


def qwen2() -> Qwen2Config:
    """More embedding rows than the tokenizer has tokens, as the published ones have."""
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen2Config(**common(vocab_size=307, tie_word_embeddings=False, rope_parameters=rope))


def qwen3() -> Qwen3Config:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen3Config(**common(head_dim=32, tie_word_embeddings=True, rope_parameters=rope))


def mistral() -> MistralConfig:
    return MistralConfig(
        **common(
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=32,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def gemma3() -> Gemma3TextConfig:
    """Five sliding layers, a full one and a sliding one; the score scale is not the head size's."""
    return Gemma3TextConfig(
        **common(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=7,
            num_key_value_heads=1,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=32,
            tie_word_embeddings=True,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        )
    )


def tiny_models() -> list[TinyModel]:
    """Every tiny checkpoint, in a fixed order."""
    return [
        TinyModel("llama", llama(), 1, prompt_lengths=(70, 133, 600), eos=[EOS, IM_END]),
        TinyModel("llama31-rope", llama31_rope(), 2),
        TinyModel("qwen2", qwen2(), 3, eos=IM_END),
        TinyModel("qwen3", qwen3(), 4, eos=[IM_END, EOS]),
        TinyModel("mistral", mistral(), 5, adds_bos=True),
        TinyModel("gemma3", gemma3(), 6, adds_bos=True),
        TinyModel("llama-bf16-sharded", llama(), 7, dtype=torch.bfloat16, max_shard_size="60KB"),
        TinyModel("qwen3-f16", qwen3(), 8, dtype=torch.float16),
    ]


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter so that each has a visible effect on logits of a few units."""
    rng = np.random.default_rng(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
        parameter.data = noise * scale_of(name, parameter) + centre_of(name, model)


def scale_of(name: str, parameter: torch.Tensor) -> float:
    if "norm" in name or name.endswith("bias"):
        return 0.3
    if "embed_tokens" in name or "lm_head" in name:
        return 0.35
    return (1.7 if "q_proj" in name or "k_proj" in name else 1.2) * parameter.shape[1] ** -0.5


def centre_of(name: str, model: PreTrainedModel) -> float:
    """Norm weights lie around one, except Gemma's, which are stored as the distance from one."""
    is_norm = "norm" in name
    return 1.0 if is_norm and not isinstance(model.config, Gemma3TextConfig) else 0.0


def write_checkpoint(tiny: TinyModel, folder: Path) -> None:
    """Write weights, configuration in both spellings, generation settings and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    model = AutoModelForCausalLM.from_config(tiny.config, dtype=torch.float32)
    randomise(model, tiny.seed)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=tiny.eos)
    model.to(tiny.dtype).save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    write_tokenizer(folder, tiny.adds_bos)
    write_old_config(folder)


def write_old_config(folder: Path) -> None:
    """Spell config.json as transformers 4 did, and check that it is read as the same model."""
    new = json.loads((folder / "config.json").read_text())
    dropped = {"rope_parameters", "layer_types", "_sliding_window_pattern"}
    old = {key: value for key, value in new.items() if key not in dropped}
    old["torch_dtype"] = old.pop("dtype")
    old["transformers_version"] = "4.51.0"
    rope = new["rope_parameters"]
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = 6
        rope = rope["full_attention"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old["rope_theta"] = rope["rope_theta"]
    old["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if new["model_type"] == "llama":
        del old["head_dim"]
    if new.get("use_sliding_window") is False:
        old["sliding_window"] = 32  # present but unused, as in the published Qwen files
    text = json.dumps(dict(sorted(old.items())), indent=2) + "\n"
    (folder / "config.transformers4.json").write_text(text)
    check_same_config(folder, text)


def check_same_config(folder: Path, old_text: str) -> None:
    """Raise unless transformers reads both spellings alike."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(old_text)
        old = AutoConfig.from_pretrained(scratch).to_dict()
    new = AutoConfig.from_pretrained(folder).to_dict()
    ignored = {"transformers_version", "_name_or_path", "sliding_window_pattern"}
    ignored |= {"_sliding_window_pattern"}
    differing = [
        k for k in new.keys() | old.keys() if k not in ignored and new.get(k) != old.get(k)
    ]
    if differing:
        raise SystemExit(f"{folder.name}: the two spellings of config.json differ in {differing}")


def write_tokenizer(folder: Path, adds_bos: bool) -> None:
    """A byte-level BPE of 300 tokens, with ChatML as its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_ORDINARY_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    if tokenizer.get_vocab_size() != VOCAB_SIZE or tokenizer.token_to_id("<|im_end|>") != IM_END:
        raise SystemExit("The tokenizer did not come out with the expected ids.")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
