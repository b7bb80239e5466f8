"""Real steps of a made-up program, for what no peak tells: the shares of them that steps reach.

Decides the program and which of its steps are timed: batches that decode, and prompts alone and
beside them, with weights of two formats; and what the engine takes beside its executor.

Invariant: executor and engine are those that serve; only the weights mean nothing.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.cost.accounting import PreparedProgram, account
from octavo.cost.fitting import Step
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.executors.cpu import CPUExecutor
from octavo.executors.preparing import prepare
from octavo.models.registry import build_program, read_huggingface_config
from octavo.planning.steps import num_blocks, step_of
from octavo.program.program import Chunk, Program
from octavo.request import SamplingParams

Clock = Callable[[], float]
_BLOCK = 32
# How weights are stored, and the shape: a wide program in bf16, and a deep narrow one in
# int4_group, so that products, values between operations and overheads are told apart.
PROGRAMS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("BF16", {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 6}),
    ("Q4_0", {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 16}),
)
# Streams that decode, positions that each sees, tokens of a prompt beside them, and those before.
Point = tuple[int, int, int, int]
POINTS: tuple[Point, ...] = (
    *((batch, 64, 0, 0) for batch in (1, 2, 3, 4, 8, 16, 32, 64)),
    *((batch, 1024, 0, 0) for batch in (1, 4, 16, 48)),
    *((0, 0, chunk, 0) for chunk in (16, 48, 128, 384)),
    *((0, 0, chunk, 1024) for chunk in (32, 256)),
    *((batch, 256, chunk, 0) for batch, chunk in ((2, 32), (8, 128), (32, 320))),
)
# All steps twice, a second apart, since a neighbour may slow this machine for as long. Runs of
# each: as many as take so long, but between two and six.
_ROUNDS, _SECONDS, _LEAST_RUNS, _MOST_RUNS = 2, 0.01, 2, 6
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_384,
    "intermediate_size": 1536,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_ENGINE_BATCHES, _ENGINE_STEPS = (1, 17), 24


class Noise:
    """Weights of any program, of ordinary size. dtype: of all matrices, BF16 or Q4_0."""

    def __init__(self, program: Program, dtype: str) -> None:
        self._shapes = program.parameters
        self._dtype = dtype
        self._random = np.random.default_rng(0)

    def __call__(self, parameter: str) -> NDArray[np.float32]:
        """Return ones: of what is no matrix."""
        return np.ones(self._shapes[parameter], np.float32)

    def dtype(self, parameter: str) -> str:
        """Return how a parameter is stored."""
        return self._dtype if len(self._shapes[parameter]) == 2 else "F32"

    def stored_rows(self, parameter: str) -> NDArray[np.uint8]:
        """Return a matrix as stored, (outputs, bytes per row)."""
        outputs, inputs = self._shapes[parameter]
        if self._dtype == "BF16":
            numbers = self._random.integers(0x3C00, 0x3D00, (outputs, inputs), np.uint16)
            return numbers.view(np.uint8)
        blocks = self._random.integers(0, 256, (outputs, inputs // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)  # the scale
        return blocks.reshape(outputs, -1)

    def release(self, parameter: str) -> None:
        """Do nothing: nothing is kept."""


class Rehearsal(NamedTuple):
    """What was measured. engine, engine_row: seconds that the engine takes beside its executor for
    a step, and for each stream in it. repeated: how many times as long as in the better round steps
    took in the worse one, nine tenths of them at most.
    """

    steps: list[Step]
    engine: float
    engine_row: float
    repeated: float = 1.0


def chunks_of(point: Point) -> list[Chunk]:
    """Return the chunks of a step."""
    batch, context, chunk, before = point
    return [Chunk(1, context)] * batch + [Chunk(chunk, before + chunk)] * (chunk > 0)


def program_of(shape: Mapping[str, int]) -> Program:
    """Return a program of a shape."""
    return build_program(read_huggingface_config({**_CONFIG, **shape}))


def rehearse(
    library: Any, isa: str, threads: int, clock: Clock, points: Sequence[Point] = POINTS
) -> Rehearsal:
    """Run the steps, and the engine on top of the last program."""
    executors, prepared = [], []
    for dtype, shape in PROGRAMS:
        program = program_of(shape)
        weights = Noise(program, dtype)
        executor = CPUExecutor(
            library,
            program,
            weights,
            num_blocks=max(num_blocks(chunks_of(point), _BLOCK) for point in points),
            block_size=_BLOCK,
            kv_dtype="bfloat16",
            max_rows=max(sum(chunk.rows for chunk in chunks_of(point)) for point in points),
            max_positions=program.max_context,
            instruction_set=isa,
            num_threads=threads,
            clock=clock,
        )
        executor.pages[:] = 0x3F  # an untouched page would be read from one line of the cache
        executors.append(executor)
        prepared.append(prepare(program, weights.dtype, "group"))
    rounds = [
        [_seconds(executor, point) for executor in executors for point in points]
        for _ in range(_ROUNDS)
    ]
    few, many = (_beside_executor(executors[-1], clock, batch) for batch in _ENGINE_BATCHES)
    for executor in executors:
        executor.close()
    each = max((many - few) / (_ENGINE_BATCHES[1] - _ENGINE_BATCHES[0]), 0.0)
    least = np.min(rounds, axis=0)
    repeated = float(np.percentile(np.max(rounds, axis=0) / least, 90))
    steps = _priced(prepared, points, least.tolist())
    return Rehearsal(steps, max(few - each, 0.0), each, repeated)


def _seconds(executor: CPUExecutor, point: Point) -> float:
    """Return the least seconds of a step."""
    batch, runs = step_of(chunks_of(point), _BLOCK), list[float]()
    while len(runs) < _LEAST_RUNS or (sum(runs) < _SECONDS and len(runs) < _MOST_RUNS):
        runs.append(executor.submit(batch).result().duration)
    return max(min(runs), 1e-9)


def _priced(
    programs: Sequence[PreparedProgram], points: Sequence[Point], seconds: Sequence[float]
) -> list[Step]:
    steps = []
    for (prepared, point), measured in zip(product(programs, points), seconds, strict=True):
        chunks = chunks_of(point)
        costs = account(prepared, chunks, len(chunks))
        steps.append(Step(costs, len(chunks), measured, prepared.step_weight_bytes))
    return steps


def _beside_executor(executor: CPUExecutor, clock: Clock, batch: int) -> float:
    """Return the median seconds of a step in which so many decode, less its executor's."""
    blocks = BlockManager(executor.num_blocks, _BLOCK, fingerprint=executor.fingerprint)
    engine = Engine(
        executor=executor,
        scheduler=Scheduler(blocks, max_num_batched_tokens=2 * batch, max_num_seqs=batch),
        intake=Intake(
            tokenizer=None,
            vocab_size=executor.program.vocab_size,
            max_model_len=executor.program.max_context,
            max_pool_tokens=executor.num_blocks * _BLOCK,
            seed=0,
        ),
        decoder=None,
        clock=clock,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=_ENGINE_STEPS, ignore_eos=True, detokenize=False
    )
    for number in range(batch):
        engine.add({"prompt_token_ids": [number, 1]}, params)
    beside = []
    while engine.has_unfinished:
        started = clock()
        engine.step()
        beside.append(clock() - started - engine.stats().step_time)
    return statistics.median(beside)
