"""Perplexity: how well a model foretells a text, token by token.

Decides how a text is cut into windows and which of its tokens count: a window is read on its own,
begins with BOS if the model's prompts do, and every token counts that has one before it. So all
tokens of the text count with BOS, and all but each window's first without. Knows no executor.

Invariant: two scores of the same windows are parallel, so their difference can be taken by token.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.outputs import PromptLogprobs
from octavo.engine.start import StartedEngine
from octavo.errors import BadRequestError, SettingError, shorten
from octavo.request import RequestMetrics, SamplingParams

Window = list[int]
# (tokens computed so far, tokens to compute)
OnProgress = Callable[[int, int], None]

# Executors that can be compared, and the settings that only this one takes.
_OWN_SETTINGS = {
    "cpu": ("instruction_set", "num_threads", "quantization", "weight_scales"),
    "reference": ("dtype",),
}
_MIN_COUNTED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The natural log-probability of every token that counts, in order, and what it took.

    seconds: on the engine's clock, from the first window's arrival to the last one's end.
    """

    executor: str
    logprobs: NDArray[np.float64]
    seconds: float

    @property
    def nats(self) -> float:
        """Mean negative log-likelihood of a token."""
        return -float(self.logprobs.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of `nats`, were the tokens independent draws of the language."""
        return _standard_error(self.logprobs)

    @property
    def perplexity(self) -> float:
        """Return exp(nats): the number of equally likely tokens that would be as surprising."""
        return math.exp(self.nats)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One score against another of the same windows."""

    score: Score
    other: Score

    @property
    def ratio(self) -> float:
        """Perplexity over the other's; 1 where they are as good."""
        return math.exp(self.score.nats - self.other.nats)

    @property
    def percent(self) -> float:
        """How far the perplexity lies above the other's."""
        return 100 * (self.ratio - 1)

    @property
    def standard_error_percent(self) -> float:
        """Standard error of `percent`, from the difference of each token's log-probabilities."""
        return 100 * self.ratio * _standard_error(self.score.logprobs - self.other.logprobs)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def cut_windows(token_ids: Ordered[int], *, context: int, bos_id: int | None) -> list[Window]:
    """Return windows of at most `context` tokens, BOS included, that part `token_ids` in order.

    A last window in which no token counts is left out. Raises a `BadRequestError` if fewer than
    two tokens count.
    """
    begin = [] if bos_id is None else [bos_id]
    size = context - len(begin)
    if context < 2:
        raise BadRequestError(
            f"A context of {context:,} tokens holds none that has one before it. Give at least 2."
        )
    cut = ([*begin, *token_ids[at : at + size]] for at in range(0, len(token_ids), size))
    windows = [window for window in cut if len(window) > 1]
    num_counted = count_tokens(windows)
    if num_counted < _MIN_COUNTED:
        raise BadRequestError(
            f"The text has {len(token_ids):,} tokens, of which {num_counted} count: a token needs "
            f"one before it. Give a text in which at least {_MIN_COUNTED} count."
        )
    return windows


def count_tokens(windows: Ordered[Window]) -> int:
    """Return how many tokens of `windows` count."""
    return sum(len(window) - 1 for window in windows)


def windows_of(started: StartedEngine, text: str, *, num_tokens: int, context: int) -> list[Window]:
    """Return the windows of the first `num_tokens` tokens of `text`, or of all if there are fewer.

    Raises a `BadRequestError` if the model cannot read the text or hold a window.
    """
    tokenizer = started.tokenizer
    if tokenizer is None:
        raise BadRequestError("This model came without a tokenizer: name one with --tokenizer.")
    held = started.engine.intake.max_model_len
    if context >= held:
        raise BadRequestError(
            f"A context of {context:,} tokens does not fit: the model holds {held:,}, one of them "
            f"for the answer. Give at most {held - 1:,}, or a larger --max-model-len if the model "
            "allows it."
        )
    ids = tokenizer.encode(text, add_bos=False)[:num_tokens]
    return cut_windows(ids, context=context, bos_id=tokenizer.bos_id if tokenizer.add_bos else None)


def score_windows(
    engine: Engine, windows: Ordered[Window], on_progress: OnProgress = lambda done, total: None
) -> Score:
    """Run all windows at once and return their score; raises what a window fails with."""
    # The engine computes the token that it must generate from a window's last, and no further.
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    places = {engine.add({"prompt_token_ids": w}, params).request_id: w for w in windows}
    found: dict[str, Ordered[float]] = {}
    times: list[RequestMetrics] = []
    before, total = engine.stats().num_computed_tokens, sum(map(len, windows))
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            assert delta.prompt_logprobs is not None
            assert delta.metrics is not None
            window = places[delta.request_id]
            found[delta.request_id] = list(_logprobs(window, delta.prompt_logprobs))
            times.append(delta.metrics)
        on_progress(engine.stats().num_computed_tokens - before, total)
    return Score(
        executor=engine.executor.name,
        logprobs=np.concatenate([found[request_id] for request_id in places]),
        seconds=max(t.finished_time or 0 for t in times) - min(t.arrival_time for t in times),
    )


def _logprobs(window: Window, reported: PromptLogprobs) -> Iterator[float]:
    """Yield the log-probability of every token that counts; the first has none before it."""
    for token_id, position in zip(window[1:], reported[1:], strict=True):
        assert position is not None
        yield position[token_id].logprob


def configs_to_compare(config: EngineConfig, other: str) -> tuple[EngineConfig, EngineConfig]:
    """Return `config` and the same for executor `other`; each without the other's own settings."""
    own = "cpu" if config.executor == "auto" else config.executor
    if other not in _OWN_SETTINGS:
        listed = " or ".join(_OWN_SETTINGS)
        raise SettingError(f"compare must be {listed}, not {shorten(other)}.")
    if other == own:
        raise SettingError(f"There is nothing to compare: both executors would be {own}.")
    return _only(config, own), _only(config, other)


def _only(config: EngineConfig, executor: str) -> EngineConfig:
    """Return `config` for an executor, without what only another one takes."""
    changes: dict[str, Any] = {"executor": executor}
    for owner, names in _OWN_SETTINGS.items():
        if owner != executor:
            changes |= {name: getattr(EngineConfig(), name) for name in names}
    return replace(config, **changes)
