"""Rows to draw from: logits, what a request asks of them, and bounds on chance.

Draws have fixed seeds, so a statistical test passes or fails for good. Its bound is the 1e-6
quantile of the chi-square distribution (Wilson and Hilferty's approximation).
"""

import math

import numpy as np

from octavo.executors.executor import SampleRow
from octavo.executors.sampling import sample
from octavo.request import Request, SamplingParams

INF = math.inf


def make_row(
    prompt=(0,),
    output=(),
    *,
    logit_row=0,
    seed=1,
    index=0,
    position=None,
    stop_ids=(),
    bad_words=(),
    mask=None,
    **params,
) -> SampleRow:
    """The row that draws the token after `prompt` and `output`; its request is named "r0"."""
    sampling = SamplingParams(**{"max_tokens": None, **params})
    request = Request(
        request_id=f"r{logit_row}",
        prompt_token_ids=list(prompt),
        params=sampling,
        max_tokens=100,
        seed=seed,
        stop_ids=frozenset(stop_ids),
        bad_word_ids=tuple(bad_words),
    )
    history = (*prompt, *output) if sampling.needs_history or bad_words else ()
    place = len(prompt) + len(output) if position is None else position
    return SampleRow(logit_row, request, index, place, len(output), history, mask)


def logits_of(seed: int, vocab: int = 500, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def draw(logits, row) -> int:
    return sample(logits, row)[0]


def draws(logits, n, **settings) -> list[int]:
    return [draw(logits, make_row(position=p, **settings)) for p in range(n)]


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def chi_square(counts, expected) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """The value that a chi-square variable exceeds once in a million."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3
