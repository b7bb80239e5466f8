"""How tests make engines: the tiny checkpoints, and executors that fail or that do not compute."""

from collections.abc import Collection
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputDelta
from octavo.executors.executor import Batch, Executor, StepResult
from octavo.native import library
from octavo.request import CompletionOutput

TINY = Path(__file__).parent / "golden" / "tiny"
NUM_TEXT_TOKENS = 296  # every tiny model's ids below are text; 296 to 299 are special


def tiny(name: str = "llama", **settings: Any) -> LLM:
    """Start a tiny random-weight model: 10 ms. One thread suits it, and leaves CPUs to others."""
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 128}
    if library is not None and not {"executor", "dtype"} & set(settings):
        defaults["num_threads"] = 1
    return LLM(str(TINY / name), **{**defaults, **settings})


def tokens(length: int, seed: int = 0) -> dict[str, list[int]]:
    """Return a prompt of `length` random ids."""
    ids = np.random.default_rng(seed).integers(0, NUM_TEXT_TOKENS, length)
    return {"prompt_token_ids": ids.tolist()}


def greedy(max_tokens: int | None = 8, **params: Any) -> SamplingParams:
    """Return greedy parameters that no end token cuts short."""
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    return SamplingParams(**fields)


def drawn(max_tokens: int = 8, **params: Any) -> SamplingParams:
    """Return sampling parameters that no end token cuts short."""
    return greedy(max_tokens, **{"temperature": 1.0, **params})


def only(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    """Return the only answer to one prompt."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    return completion


def drain(engine: Engine, max_steps: int = 10_000) -> list[OutputDelta]:
    """Step until nothing is left, and return every delta."""
    deltas: list[OutputDelta] = []
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return deltas
        deltas += engine.step()
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: Engine) -> None:
    """Nothing runs or waits, every block is free, and the books are in order."""
    engine.scheduler.check()
    stats = engine.stats()
    assert not engine.has_unfinished
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_shared_blocks == stats.num_empty_slots == engine.scheduler.blocks.num_reserved
    assert len(engine._constraints) == 0


class FailingExecutor:
    """Runs another executor's steps, but raises `error` in those numbered in `at`, from 1."""

    def __init__(self, inner: Executor, at: Collection[int], error: BaseException) -> None:
        self.inner, self.at, self.error = inner, at, error
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: Batch) -> Future[StepResult]:
        self.num_steps += 1
        if self.num_steps not in self.at:
            return self.inner.submit(batch)
        if not isinstance(self.error, Exception):
            raise self.error
        future: Future[StepResult] = Future()
        future.set_exception(self.error)
        return future


class InstantExecutor:
    """Computes nothing: every sequence draws the ids of `spells`, over and over."""

    name = "instant"
    fingerprint = "instant"
    notes: tuple[str, ...] = ()

    def __init__(
        self, num_blocks: int, block_size: int, spells: Ordered[int] = (64, 65, 66)
    ) -> None:
        self.num_blocks, self.block_size, self.spells = num_blocks, block_size, spells

    def submit(self, batch: Batch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        drawn = [self.spells[row.num_output % len(self.spells)] for row in batch.samples]
        future.set_result(StepResult(drawn, [None] * len(drawn)))
        return future

    def close(self) -> None:
        pass
