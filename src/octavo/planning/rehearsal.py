"""Real steps of a made-up program, for what no peak tells: the shares of them that steps reach.

Decides the program and which of its steps are timed: batches that decode, and prompts alone and
beside them. Its weights are noise in two formats, one that products limit and one that memory does.

Invariant: the executor is the one that serves; only the weights mean nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import account
from octavo.cost.fitting import Step
from octavo.executors.cpu import CPUExecutor
from octavo.executors.preparing import prepare
from octavo.models.registry import build_program, read_huggingface_config
from octavo.planning.steps import num_blocks, step_of
from octavo.program.program import Chunk, Program

_BLOCK = 32
# As stored: they become bf16 and int8_group.
DTYPES = ("BF16", "Q8_0")
# Streams that decode, positions that each sees, tokens of a prompt beside them, and those before it.
Point = tuple[int, int, int, int]
POINTS: tuple[Point, ...] = (
    *((batch, 64, 0, 0) for batch in (1, 2, 3, 4, 8, 16, 32, 64)),
    *((batch, 1024, 0, 0) for batch in (1, 4, 16, 48)),
    *((0, 0, chunk, 0) for chunk in (16, 48, 128, 256, 512)),
    *((0, 0, chunk, 1024) for chunk in (32, 128, 512)),
    *((batch, 256, chunk, 0) for batch, chunk in ((2, 32), (8, 128), (32, 448))),
)
_DECODES, _PROMPTS = 4, 2  # runs of each
_LONG_PROMPT = 64
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


class Noise:
    """Weights of any program, of ordinary size. dtype: how all matrices are stored."""

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
        blocks = self._random.integers(0, 256, (outputs, inputs // 32, 34), np.uint8)
        blocks[..., :2] = np.float16(1e-3).view(np.uint16).tobytes()[0], 0x14
        return blocks.reshape(outputs, -1)

    def release(self, parameter: str) -> None:
        """Do nothing: nothing is kept."""


def chunks_of(point: Point) -> list[Chunk]:
    """Return the chunks of a step."""
    batch, context, chunk, before = point
    return [Chunk(1, context)] * batch + [Chunk(chunk, before + chunk)] * (chunk > 0)


def rehearse(
    library: Any,
    instruction_set: str,
    threads: int,
    clock: Callable[[], float],
    points: Sequence[Point] = POINTS,
) -> list[Step]:
    """Return steps with the seconds that they take, the least of a few runs."""
    program = build_program(read_huggingface_config(_CONFIG))
    return [
        step
        for dtype in DTYPES
        for step in _steps(library, program, dtype, instruction_set, threads, clock, points)
    ]


def _steps(
    library: Any,
    program: Program,
    dtype: str,
    instruction_set: str,
    threads: int,
    clock: Callable[[], float],
    points: Sequence[Point],
) -> Iterator[Step]:
    executor = CPUExecutor(
        library,
        program,
        Noise(program, dtype),
        num_blocks=max(num_blocks(chunks_of(point), _BLOCK) for point in points),
        block_size=_BLOCK,
        kv_dtype="bfloat16",
        max_rows=max(sum(chunk.rows for chunk in chunks_of(point)) for point in points),
        max_positions=program.max_context,
        instruction_set=instruction_set,
        num_threads=threads,
        clock=clock,
    )
    executor.pages[:] = 0x3F  # an untouched page would be read from one line of the cache
    prepared = prepare(program, lambda _: dtype, "group")
    for point in points:
        chunks = chunks_of(point)
        batch = step_of(chunks, _BLOCK)
        num_runs = _PROMPTS if point[2] > _LONG_PROMPT else _DECODES
        measured = min(executor.submit(batch).result().duration for _ in range(num_runs))
        yield Step(account(prepared, chunks, len(chunks)), len(chunks), measured)
    executor.close()
