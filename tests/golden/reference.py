"""Logits and greedy continuations of a Hugging Face model, and the checks that make them golden.

Everything is float32 with eager attention on one thread. Without a key-value cache by default, so
that a golden decode step is a plain forward pass over the whole sequence.
"""

import copy
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

Logits = np.ndarray  # float32 [positions, vocabulary]


def use_determinism() -> None:
    """One thread, deterministic kernels, no gradients."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)


def load(folder: Path) -> PreTrainedModel:
    """The checkpoint's weights, widened to float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits_of(model: PreTrainedModel, ids: list[int]) -> Logits:
    """The logits at every position of one sequence."""
    out = model(torch.tensor([ids]), use_cache=False).logits[0]
    return out.numpy()


def greedy(model: PreTrainedModel, ids: list[int], steps: int) -> tuple[np.ndarray, Logits]:
    """The `steps` likeliest next tokens and the logits that each was taken from."""
    ids = list(ids)
    tokens, rows = [], []
    for _ in range(steps):
        row = logits_of(model, ids)[-1]
        tokens.append(int(row.argmax()))
        rows.append(row)
        ids.append(tokens[-1])
    return np.array(tokens, np.int32), np.stack(rows)


def greedy_cached(
    model: PreTrainedModel, ids: list[int], steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """As `greedy`, through the key-value cache; gives each step's top-2 margin, not its logits."""
    tokens, margins = [], []
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    for step in range(steps):
        best, second = out.logits[0, -1].topk(2).values.tolist()
        tokens.append(int(out.logits[0, -1].argmax()))
        margins.append(best - second)
        if step + 1 < steps:
            ids_in = torch.tensor([tokens[-1:]])
            out = model(ids_in, cache=out.cache, use_cache=True)
    return np.array(tokens, np.int32), np.array(margins, np.float32)


def relative_error(ours: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(ours - exact).max() / np.abs(exact).max())


def check_float64(model: PreTrainedModel, ids: list[int], limit: float = 1e-5) -> float:
    """Raise unless float32 agrees with float64. (The model's norms and softmax stay float32.)"""
    error = relative_error(logits_of(model, ids), logits_of(copy.deepcopy(model).double(), ids))
    if error > limit:
        raise SystemExit(f"float32 logits are {error:.1e} off the float64 ones; limit {limit}")
    return error


def check_cache(model: PreTrainedModel, ids: list[int], tokens: np.ndarray) -> None:
    """Raise unless decoding through the key-value cache gives the same tokens."""
    cached, _ = greedy_cached(model, ids, len(tokens))
    if not np.array_equal(cached, tokens):
        raise SystemExit("Decoding with and without the cache gave different tokens.")


def check_window(model: PreTrainedModel, ids: list[int]) -> float:
    """Raise unless the sliding window matters exactly from the first position that it cuts.

    Gives the largest difference of a logit with and without the window.
    """
    wide = copy.deepcopy(model)
    window = model.config.sliding_window
    wide.config.sliding_window = 1 << 20 if isinstance(model.config, Gemma3TextConfig) else None
    difference = np.abs(logits_of(model, ids) - logits_of(wide, ids)).max(axis=1)
    if difference[:window].max() > 1e-5 or difference[window:].min() < 1e-3:
        raise SystemExit(f"The window of {window} is not what distinguishes the logits.")
    return float(difference.max())


def check_rope_scaling(model: PreTrainedModel, ids: list[int]) -> float:
    """Raise unless the model's rope scaling changes its logits; gives the largest difference."""
    plain_config = copy.deepcopy(model.config)
    theta = plain_config.rope_parameters["rope_theta"]
    plain_config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    plain = AutoModelForCausalLM.from_config(plain_config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    difference = float(np.abs(logits_of(model, ids) - logits_of(plain, ids)).max())
    if difference < 0.1:
        raise SystemExit(f"The rope scaling changes logits by only {difference:.1e}.")
    return difference
