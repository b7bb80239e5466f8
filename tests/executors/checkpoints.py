"""The golden checkpoints on the reference executor, and batches written by hand."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.executors.executor import Batch, PromptRow, SampleRow
from octavo.executors.reference import ReferenceExecutor
from octavo.models.registry import WeightReader, build_program, read_huggingface_config
from octavo.program.program import Program
from octavo.weights.safetensors import open_safetensors

TINY = Path(__file__).parents[1] / "golden" / "tiny"
NAMES = sorted(path.parent.name for path in TINY.glob("*/logits.npz"))


class Piece(NamedTuple):
    """`count` tokens of a sequence, from position `start` on."""

    token_ids: Sequence[int]
    start: int
    count: int
    table: Sequence[int]


@cache
def load(name: str) -> tuple[Program, dict[str, np.ndarray]]:
    config = read_huggingface_config(json.loads((TINY / name / "config.json").read_text()))
    program = build_program(config)
    with open_safetensors(TINY / name) as source:
        read = WeightReader(config, program, source)
        return program, {parameter: read(parameter) for parameter in program.parameters}


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(TINY / name / "logits.npz"))


def executor(name: str, weights: dict[str, np.ndarray] | None = None, **settings):
    """A reference executor of a checkpoint, by default with its own weights and float32 pages."""
    program, own = load(name)
    weights = own if weights is None else weights
    defaults = {"num_blocks": 160, "block_size": 16, "kv_dtype": "float32", "clock": lambda: 0.0}
    settings = defaults | settings
    return ReferenceExecutor(program, weights.__getitem__, **settings)


def batch(
    *pieces: Piece,
    rows: Iterable[int] | None = None,
    copies: Sequence[tuple[int, int]] = (),
    samples: tuple[SampleRow, ...] = (),
    prompt_rows: tuple[PromptRow, ...] = (),
) -> Batch:
    """One step; logits of every row unless `rows` says which."""
    starts = np.cumsum([0, *(piece.count for piece in pieces)])
    tables = np.zeros((len(pieces), max(len(piece.table) for piece in pieces)), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.table)] = piece.table
    spans = [(piece, piece.start, piece.start + piece.count) for piece in pieces]
    wanted = range(starts[-1]) if rows is None else rows
    return Batch(
        token_ids=np.concatenate([piece.token_ids[a:b] for piece, a, b in spans]).astype(np.int32),
        positions=np.concatenate([np.arange(a, b) for _, a, b in spans]).astype(np.int32),
        chunk_starts=starts.astype(np.int32),
        block_tables=tables,
        context_lengths=np.array([b for _, _, b in spans], np.int32),
        copies=np.array(copies, np.int32).reshape(-1, 2),
        logit_rows=np.array(list(wanted), np.int32),
        samples=samples,
        prompt_rows=prompt_rows,
    )
