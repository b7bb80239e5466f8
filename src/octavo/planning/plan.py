"""A plan: what a model needs and does on a machine, from its configuration alone.

Decides what a plan tells: memory by weight format, the pool, latency and throughput over the batch
size, what block size and quantisation change, and machines for a load.

Invariant: everything comes from the prepared program and the machine's limits; nothing runs.
"""

from dataclasses import dataclass, replace
from typing import Literal

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram
from octavo.cost.hardware import Machine
from octavo.cost.steps import StepTimes
from octavo.errors import InvalidParameterError, SettingError
from octavo.planning.capacity import (
    BlockSizeRow,
    Capacity,
    block_sizes,
    capacity,
    check_request,
    kv_element,
    usable_bytes,
)
from octavo.planning.fleet import Fleet, Limits, plan_fleet
from octavo.planning.latency import BatchRow, Latency, Lengths, batch_sizes, knee
from octavo.planning.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """What a weight format changes; the pool and times are None where the weights do not fit."""

    name: str
    weight_bytes: int
    pool_tokens: int | None
    requests_at_once: int | None
    inter_token: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Times in seconds. knee: the batch size with the most throughput per latency.

    max_batch: most requests at once, by memory and by max_num_seqs. ttft: of a prompt on an idle
    machine. fleet: only for a given load.
    """

    model: str
    machine: Machine
    lengths: Lengths
    capacity: Capacity
    max_batch: int
    formats: tuple[FormatRow, ...]
    block_sizes: tuple[BlockSizeRow, ...]
    ttft: float
    rows: tuple[BatchRow, ...]
    knee: int
    fleet: Fleet | None = None


def make_plan(
    subject: Subject,
    machine: Machine,
    config: EngineConfig,
    lengths: Lengths,
    *,
    requests_per_second: float | None = None,
    limits: Limits | None = None,
) -> Plan:
    """Plan a model on a machine; raises an `OctavoError` that says what would fit if it does not.

    requests_per_second, limits: a load that a number of machines shall serve.
    """
    _check_lengths(lengths)
    prepared = prepared_for(subject, machine, config)
    found = capacity(prepared, machine, config, lengths.total)
    check_request(found, subject.program.max_context, lengths.total)
    max_batch = min(found.requests_at_once, config.max_num_seqs)
    latency = _latency(prepared, machine, config, lengths)
    rows = [latency.row(batch) for batch in batch_sizes(max_batch)]
    best = knee(rows)
    fleet = None
    if requests_per_second is not None:
        fleet = plan_fleet(latency, max_batch, requests_per_second, limits or Limits())
    return Plan(
        model=subject.name,
        machine=machine,
        lengths=lengths,
        capacity=found,
        max_batch=max_batch,
        formats=tuple(_formats(subject, machine, config, lengths)),
        block_sizes=tuple(block_sizes(found, lengths.total)),
        ttft=latency.first_token(),
        rows=tuple(replace(row, is_knee=row.batch == best) for row in rows),
        knee=best,
        fleet=fleet,
    )


def prepared_for(subject: Subject, machine: Machine, config: EngineConfig) -> PreparedProgram:
    """Return the program as it would run there."""
    chosen = None if config.quantization == "none" else config.quantization
    if chosen is not None and not subject.is_float:
        raise SettingError(
            f"quantization {chosen} needs float weights, but those of {subject.name} "
            "are quantised already. Leave it out."
        )
    return subject.prepared(
        config.weight_scales,
        quantization=chosen,
        kv_element=kv_element(config, subject.program),
    )


def _latency(
    prepared: PreparedProgram, machine: Machine, config: EngineConfig, lengths: Lengths
) -> Latency:
    return Latency(StepTimes(prepared, machine), lengths, config.max_num_batched_tokens)


def _formats(
    subject: Subject, machine: Machine, config: EngineConfig, lengths: Lengths
) -> list[FormatRow]:
    """The file's own format, if it is quantised, and what its floats would become."""
    floats, rows = subject.as_floats(), []
    if not subject.is_float:
        stored = replace(config, quantization="none")
        rows.append(_format_row("as stored", subject, machine, stored, lengths))
    choices: tuple[tuple[str, Literal["none", "int8", "int4"]], ...] = (
        ("bf16", "none"),
        ("int8", "int8"),
        ("int4", "int4"),
    )
    for name, bits in choices:
        chosen = replace(config, quantization=bits)
        rows.append(_format_row(name, floats, machine, chosen, lengths))
    return rows


def _format_row(
    name: str, subject: Subject, machine: Machine, config: EngineConfig, lengths: Lengths
) -> FormatRow:
    prepared = prepared_for(subject, machine, config)
    size = prepared.total_weight_bytes
    row = FormatRow(
        name=name,
        weight_bytes=size,
        pool_tokens=None,
        requests_at_once=None,
        inter_token=None,
        tokens_per_second=None,
    )
    if size >= usable_bytes(machine):
        return row
    try:
        found = capacity(prepared, machine, config, lengths.total)
    except SettingError:  # no room beside them for the pool that was asked for
        return row
    most = min(found.requests_at_once, config.max_num_seqs)
    row = replace(
        row,
        pool_tokens=found.num_blocks * found.block_size,
        requests_at_once=found.requests_at_once,
    )
    if not most:
        return row
    latency = _latency(prepared, machine, config, lengths)
    best = max((latency.row(batch) for batch in batch_sizes(most)), key=_tokens_per_second)
    return replace(row, inter_token=latency.decode(1), tokens_per_second=best.tokens_per_second)


def _tokens_per_second(row: BatchRow) -> float:
    return row.tokens_per_second


def _check_lengths(lengths: Lengths) -> None:
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(lengths, name) < 1:
            raise InvalidParameterError(name, getattr(lengths, name), "at least 1")
