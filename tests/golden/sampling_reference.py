"""Distributions filtered by transformers' own logits processors: an oracle for a sampler.

A case is a row of the tiny llama's decode logits and processors in the order they are applied.
Invariant: no case is decided by rounding, so that the kept tokens of another implementation agree.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

Steps = list[tuple[str, float]]

PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
ROWS = [(0, 0), (0, 5), (1, 3), (2, 7)]  # prompt and decode step of each row

STEPS: list[Steps] = [
    [],
    [("temperature", 0.5)],
    [("temperature", 1.7)],
    [("top_k", 1)],
    [("top_k", 20)],
    [("top_k", 300)],
    [("top_p", 0.1)],
    [("top_p", 0.9)],
    [("top_p", 0.99)],
    [("min_p", 0.05)],
    [("min_p", 0.5)],
    [("repetition_penalty", 1.3)],
    [("repetition_penalty", 0.8)],
    [("temperature", 0.7), ("top_p", 0.9)],
    [("temperature", 2.0), ("top_k", 50)],
    [("temperature", 1.5), ("min_p", 0.1)],
    [("top_k", 40), ("top_p", 0.8)],
    [("temperature", 0.8), ("top_k", 40), ("top_p", 0.95)],
    [("repetition_penalty", 1.1), ("temperature", 0.7), ("top_k", 30), ("top_p", 0.9)],
    [("repetition_penalty", 1.2), ("temperature", 1.3), ("min_p", 0.02)],
    # The next two differ in their order only, and therefore in what they keep.
    [("temperature", 1.5), ("top_k", 100), ("top_p", 0.95), ("min_p", 0.05)],
    [("temperature", 1.5), ("min_p", 0.05), ("top_k", 100), ("top_p", 0.95)],
]


def make_sampling(folder: Path) -> None:
    """Write sampling.npz and sampling.json from the tiny llama's goldens."""
    logits, histories = load_rows(folder / "tiny" / "llama" / "logits.npz")
    probabilities, cases = [], []
    for steps in STEPS:
        for row, history in enumerate(histories):
            check_decided(logits[row], history, steps)
            probabilities.append(filtered(logits[row], history, steps))
            num_kept = int((probabilities[-1] > 0).sum())
            cases.append({"row": row, "processors": steps, "num_kept": num_kept})
    np.savez_compressed(
        folder / "sampling.npz", logits=logits, probabilities=np.stack(probabilities)
    )
    (folder / "sampling.json").write_text(to_json(histories, cases))
    print(f"sampling: {len(cases)} cases, {[case['num_kept'] for case in cases]} tokens kept")


def to_json(histories: list[list[int]], cases: list[dict[str, Any]]) -> str:
    """One line a history and a case; case i is row i of `probabilities`."""
    parts = {"histories": histories, "cases": cases}
    blocks = [
        f'"{key}": [\n' + ",\n".join(" " + json.dumps(item) for item in items) + "\n]"
        for key, items in parts.items()
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def load_rows(file: Path) -> tuple[np.ndarray, list[list[int]]]:
    """The logits of every row, and the ids (prompt and decoded) that came before each."""
    goldens = np.load(file)
    logits = np.stack([goldens[f"prompt{p}_decode_logits"][step] for p, step in ROWS])
    histories = [
        [*goldens[f"prompt{p}_ids"].tolist(), *goldens[f"prompt{p}_decode_ids"][:step].tolist()]
        for p, step in ROWS
    ]
    return logits, histories


def filtered(logits: np.ndarray, history: list[int], steps: Steps) -> np.ndarray:
    """The distribution after every step, float32 [vocabulary]."""
    scores = torch.from_numpy(logits)[None]
    ids = torch.tensor([history])
    for name, value in steps:
        scores = PROCESSORS[name](value)(ids, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


def check_decided(logits: np.ndarray, history: list[int], steps: Steps) -> None:
    """Raise if a slightly larger or smaller threshold would keep other tokens."""
    kept = filtered(logits, history, steps) > 0
    for nudge in (-2e-6, 2e-6):
        nudged = [(n, v + nudge if n in ("top_p", "min_p") else v) for n, v in steps]
        if not np.array_equal(filtered(logits, history, nudged) > 0, kept):
            raise SystemExit(f"{steps} is decided by rounding; change a value a little.")
