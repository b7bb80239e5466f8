"""The law: the same request gives the same bits, whatever else runs. `make law` prints its cells.

A cell is one way of running a few subject requests (among others, in chunks, preempted, warm...).
Its tokens and log-probabilities are compared, bit for bit, with those of each subject run alone on
a cold engine. Subjects cover greedy and sampled requests, penalties, several samples, and prompts
beyond a segment. A cell fails if it did not do what its name says to every subject.

Each executor and instruction set has bits of its own, so cells are compared within one of them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.steering import MIN_CHUNK
from octavo.executors.executor import Batch, Executor, StepResult
from octavo.native import library
from octavo.request import Logprob
from tests.core.oracle import Cost

TINY = Path(__file__).parent / "golden" / "tiny"
MODELS = ("llama", "llama31-rope", "qwen2", "qwen3", "mistral", "gemma3")
PLAIN: dict[str, Any] = {"num_gpu_blocks_override": 400, "max_model_len": 1024}
KV_FORMATS = ("bfloat16", "float32", "int8")
INSTRUCTION_SETS: list[str] = library.instruction_sets() if library else []
REFERENCE: dict[str, Any] = {"executor": "reference"}

Prompt = dict[str, list[int]]


@dataclass(frozen=True)
class Subject:
    """One request that the law is about."""

    prompt: Prompt
    params: SamplingParams


def prompt_of(length: int, seed: int) -> Prompt:
    """Return `length` random token ids that every tiny model has."""
    ids = np.random.default_rng(seed).integers(0, 296, length)
    return {"prompt_token_ids": ids.tolist()}


def subjects() -> list[Subject]:
    """Return the requests of every cell."""
    common: dict[str, Any] = {"logprobs": 5, "ignore_eos": True, "max_tokens": 9}
    return [
        Subject(prompt_of(1, 1), SamplingParams(temperature=0, **common)),
        Subject(prompt_of(31, 2), SamplingParams(temperature=0, **common)),
        Subject(prompt_of(70, 3), SamplingParams(temperature=0.8, seed=1, **common)),
        Subject(prompt_of(250, 4), SamplingParams(temperature=1.0, top_p=0.9, seed=2, **common)),
        Subject(
            prompt_of(300, 5),
            SamplingParams(
                temperature=0.9,
                top_k=40,
                repetition_penalty=1.2,
                frequency_penalty=0.5,
                seed=3,
                **common,
            ),
        ),
        Subject(prompt_of(40, 6), SamplingParams(temperature=0, prompt_logprobs=2, **common)),
        Subject(prompt_of(45, 7), SamplingParams(temperature=1.0, n=3, seed=4, **common)),
    ]


def others(count: int) -> list[Subject]:
    """Return `count` unrelated requests of mixed length."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    return [Subject(prompt_of(5 + 17 * i % 90, 100 + i), params) for i in range(count)]


def run(llm: LLM, jobs: list[Subject]) -> list[RequestOutput]:
    """Run all jobs together and return their outputs."""
    outputs = llm.generate(
        [job.prompt for job in jobs], [job.params for job in jobs], use_tqdm=False
    )
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


# --- comparing ----------------------------------------------------------------------------------


def numbers(output: RequestOutput, num_samples: int | None = None) -> list[tuple[int, float]]:
    """Return every token and log-probability that a request reported, in order."""
    found = list(_entries(output.prompt_logprobs or []))
    for completion in output.outputs[:num_samples]:
        found += [(token, 0.0) for token in completion.token_ids]
        found += _entries(completion.logprobs or [])
    return found


def _entries(positions: Iterable[dict[int, Logprob] | None]) -> Iterator[tuple[int, float]]:
    for position in positions:
        for token, entry in (position or {}).items():
            yield token, entry.logprob


def differing_bits(a: list[tuple[int, float]], b: list[tuple[int, float]]) -> int:
    """Return how many bits of tokens and log-probabilities differ."""
    if len(a) != len(b):
        return 64 * abs(len(a) - len(b))
    left, right = (np.array([x for pair in side for x in pair], np.float64) for side in (a, b))
    return int(np.bitwise_count(left.view(np.uint64) ^ right.view(np.uint64)).sum())


# --- cells --------------------------------------------------------------------------------------

Results = list[list[tuple[int, float]]]
Cell = Callable[[str, dict[str, Any]], Results]


def require(condition: bool, what: str) -> None:
    """Raise unless the cell did what its name says."""
    if not condition:
        raise AssertionError(what)


def _require_warm(outputs: list[RequestOutput]) -> None:
    """Every subject that may read the cache has read some of it."""
    for subject, output in zip(subjects(), outputs, strict=True):
        reads = subject.params.prompt_logprobs is None and len(output.prompt_token_ids) > 1
        require((output.num_cached_tokens > 0) == reads, f"{output.num_cached_tokens} cached")


def _together(settings: dict[str, Any], num_others: int = 0, repeats: int = 1) -> Cell:
    """Run the subjects among others, the last of `repeats` times."""

    def cell(model: str, base: dict[str, Any]) -> Results:
        with LLM(model, **{**base, **settings}) as llm:
            for _ in range(repeats):
                # Others stand on both sides, so that subjects are neither first nor last.
                rest = others(num_others)
                half = num_others // 2
                outputs = run(llm, rest[:half] + subjects() + rest[half:])
                outputs = outputs[half : half + len(subjects())]
        if repeats > 1:
            _require_warm(outputs)
        return [numbers(output) for output in outputs]

    return cell


def alone(model: str, base: dict[str, Any]) -> Results:
    """Run each subject by itself on a cold cache."""
    with LLM(model, **base, enable_prefix_caching=False) as llm:
        return [numbers(run(llm, [subject])[0]) for subject in subjects()]


def _preempted(model: str, base: dict[str, Any]) -> Results:
    """Run each subject beside six more important requests that grow until it has to yield.

    The pool just lets it start, with the one free block per neighbour that admission asks for; each
    neighbour takes that one when its two samples part, and two more after five steps.
    """
    growing = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, n=2)
    size, crowd = 16, [Subject(prompt_of(11, 200 + i), growing) for i in range(6)]
    results = []
    for subject in subjects():
        length = len(subject.prompt["prompt_token_ids"])
        settings = {
            **base,
            "block_size": size,
            "num_gpu_blocks_override": -(-length // size) + 2 * len(crowd),
            "scheduling_policy": "priority",
        }
        with LLM(model, **settings) as llm:
            jobs = [*crowd, subject]
            outputs = llm.generate(
                [job.prompt for job in jobs],
                [job.params for job in jobs],
                priority=[0] * len(crowd) + [1],
                use_tqdm=False,
            )
        metrics = outputs[-1].metrics
        require(metrics is not None and metrics.num_preemptions > 0, f"{length}: not preempted")
        results.append(numbers(outputs[-1]))
    return results


def _warm_after(neighbours_of: Callable[[list[int]], list[Subject]]) -> Cell:
    """Run the subjects after prompts that share beginnings with theirs."""

    def cell(model: str, base: dict[str, Any]) -> Results:
        with LLM(model, **base) as llm:
            for subject in subjects():
                run(llm, neighbours_of(subject.prompt["prompt_token_ids"]))
            outputs = run(llm, subjects())
        _require_warm(outputs)
        return [numbers(output) for output in outputs]

    return cell


def _shorter_and_longer(ids: list[int]) -> list[Subject]:
    params = SamplingParams(temperature=0, max_tokens=3)
    prompts = (ids[: len(ids) // 2 + 1], [*ids, 7, 8, 9])
    return [Subject({"prompt_token_ids": prompt}, params) for prompt in prompts]


def _turn_before(ids: list[int]) -> list[Subject]:
    """Return a request whose prompt and answer are the beginning of `ids`.

    Its last token is drawn but never computed, so nobody may find it.
    """
    half = len(ids) // 2
    params = SamplingParams(max_tokens=1, ignore_eos=True, allowed_token_ids=[ids[half]])
    return [Subject({"prompt_token_ids": ids[:half]}, params)] if half else []


class _CopyCounter:
    """Counts the block copies that an executor is asked for."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_copies = 0

    def submit(self, batch: Batch) -> Future[StepResult]:
        self.num_copies += len(batch.copies)
        return self._executor.submit(batch)

    def close(self) -> None:
        self._executor.close()


def _forked(model: str, base: dict[str, Any]) -> Results:
    """Ask for two samples more: those that were there before must stay what they were."""
    jobs = [Subject(s.prompt, replace(s.params, n=s.params.n + 2)) for s in subjects()]
    with LLM(model, **base, enable_prefix_caching=False) as llm:
        counter: Any = _CopyCounter(llm.engine.executor)
        llm.engine.executor = counter
        outputs = run(llm, jobs)
    # No prompt ends at the end of a block, so all samples but one copy the last block they share.
    num_forks = sum(job.params.n - 1 for job in jobs)
    require(counter.num_copies == num_forks, f"{counter.num_copies} copies of {num_forks}")
    pairs = zip(outputs, subjects(), strict=True)
    return [numbers(output, subject.params.n) for output, subject in pairs]


class _ChunkWatch:
    """Keeps the longest chunk of every batch that an executor gets."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.longest: list[int] = []

    def submit(self, batch: Batch) -> Future[StepResult]:
        self.longest.append(int(np.diff(batch.chunk_starts).max()))
        return self._executor.submit(batch)

    def close(self) -> None:
        self._executor.close()


def _steered(model: str, base: dict[str, Any]) -> Results:
    """Run the subjects beside a stream, with a target that leaves prompts the least chunk."""
    budget = 64
    stream = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
    settings = {"target_itl_ms": 0.001, "max_num_batched_tokens": budget, "max_num_seqs": 16}
    with LLM(model, **base, **settings) as llm:
        llm.engine.scheduler.cost = Cost()  # a token takes a second
        watch: Any = _ChunkWatch(llm.engine.executor)
        llm.engine.executor = watch
        # The stream's prompt is the whole first step, in which nobody streams yet.
        outputs = run(llm, [Subject(prompt_of(budget, 300), stream), *subjects()])
    first, *others = watch.longest
    require(first == budget and max(others) == MIN_CHUNK, f"chunks of {first}, {max(others)}")
    return [numbers(output) for output in outputs[1:]]


CELLS: dict[str, Cell] = {
    "alone, again": alone,
    "among 0 others": _together({}),
    "among 1 other": _together({}, 1),
    "among 7 others": _together({}, 7),
    "among 31 others": _together({}, 31),
    "chunks of 1": _together({"long_prefill_token_threshold": 1}),
    "chunks of 7": _together({"long_prefill_token_threshold": 7}, 3),
    "chunks of 16": _together({"long_prefill_token_threshold": 16}, 7),
    "chunks of all": _together({"max_num_batched_tokens": 4096}, 7),
    "chunks by time": _steered,
    "preempted": _preempted,
    "warm": _together({}, 3, repeats=2),
    "warm, other lengths": _warm_after(_shorter_and_longer),
    "warm, next turn": _warm_after(_turn_before),
    "forked": _forked,
    "blocks of 16": _together({"block_size": 16}, 7, repeats=2),
    "blocks of 64": _together({"block_size": 64}, 7, repeats=2),
    "blocks of 256": _together({"block_size": 256}, 7, repeats=2),
}
# Only the native executor has more threads than the one that the cells above run on.
NATIVE_CELLS: dict[str, Cell] = {
    "on 2 threads": _together({"num_threads": 2}, 7),
    "on 3 threads": _together({"num_threads": 3}, 7),
}


def native(instruction_set: str) -> dict[str, Any]:
    """Return the settings of the native executor on one instruction set, with one thread."""
    return {"executor": "cpu", "instruction_set": instruction_set, "num_threads": 1}


def cells_of(executor: dict[str, Any]) -> dict[str, Cell]:
    """Return the cells that an executor, given as settings, can run."""
    return CELLS if executor == REFERENCE else CELLS | NATIVE_CELLS


def check(model: str, base: dict[str, Any], name: str, expected: Results) -> int:
    """Return the differing bits of one cell."""
    found = (CELLS | NATIVE_CELLS)[name](model, base)
    return sum(differing_bits(a, b) for a, b in zip(expected, found, strict=True))


def executors_of(is_first: bool) -> list[dict[str, Any]]:
    """Return every executor for the first model, the reference and the best for the others."""
    usable = INSTRUCTION_SETS if is_first else INSTRUCTION_SETS[:1]
    return [REFERENCE, *map(native, usable)]


def main(models: list[str]) -> int:
    """Print every cell of every model; return 1 if a bit differs."""
    total = num_cells = 0
    for number, model in enumerate(models or [str(TINY / name) for name in MODELS]):
        for executor in executors_of(number == 0):
            for kv_format in KV_FORMATS:
                bits = _print_cells(model, executor, kv_format)
                total += sum(bits)
                num_cells += len(bits)
    print(f"{num_cells} cells, {total} differing bits")
    return 1 if total else 0


def _print_cells(model: str, executor: dict[str, Any], kv_format: str) -> list[int]:
    """Print the cells of one model on one executor; return the differing bits of each."""
    base = {**PLAIN, **executor, "kv_cache_dtype": kv_format}
    name_of_executor = executor.get("instruction_set", "reference")
    expected = alone(model, base)
    num_pairs = sum(map(len, expected))
    found = []
    for name in cells_of(executor):
        found.append(check(model, base, name, expected))
        label = f"{Path(model).name:14} {name_of_executor:9} {kv_format:8} {name:20}"
        print(f"{label} {num_pairs:6} numbers {found[-1]:4} differing bits", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
