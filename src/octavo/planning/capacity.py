"""What fits in a machine's memory: weights, the pool, contexts and requests.

Decides how much of a machine may be used. Block arithmetic is the engine's own (`resolve_cache`).
Knows no times. Invariant: a plan that does not fit is an error that says what would.
"""

from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram
from octavo.cost.hardware import MACHINES, Machine
from octavo.engine.resolve import CacheSettings, resolve_cache
from octavo.errors import BadRequestError, SettingError
from octavo.executors.pages import KVType, element_size
from octavo.program.program import Program

GIB = 1 << 30
# Of a named machine's memory; the rest is for the system and for values between operations.
USABLE_SHARE = 0.9
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Memory of one model on one machine, in bytes, blocks and tokens.

    longest_context: most tokens of one request. requests_at_once: of the planned lengths that the
    pool holds together.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    pool_bytes: int
    block_size: int
    num_blocks: int
    longest_context: int
    requests_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeRow:
    """What a block size changes. wasted_tokens: slots of a request's last block that stay empty."""

    block_size: int
    num_blocks: int
    wasted_tokens: int
    requests_at_once: int


def kv_element(config: EngineConfig, program: Program) -> float:
    """Return the bytes of a number in the pages, its scale included."""
    chosen: KVType = "bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return element_size(chosen, program.kv_groups[0].head_dim)


def capacity(
    prepared: PreparedProgram, machine: Machine, config: EngineConfig, num_tokens: int
) -> Capacity:
    """Return what a machine holds; num_tokens: of one planned request, its answer included.

    Raises `SettingError` if the weights or a block do not fit.
    """
    free = _free_beside(prepared, machine)
    cache = _cache(prepared, machine, config, free)
    return Capacity(
        weight_bytes=prepared.total_weight_bytes,
        kv_bytes_per_token=prepared.kv_bytes_per_token,
        pool_bytes=cache.num_blocks * cache.block_size * prepared.kv_bytes_per_token,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        longest_context=min(cache.max_model_len, cache.num_blocks * cache.block_size),
        requests_at_once=_at_once(cache.num_blocks, cache.block_size, num_tokens),
    )


def check_request(found: Capacity, max_context: int, num_tokens: int) -> None:
    """Raise `BadRequestError` unless one planned request fits alone; the message says what would.

    max_context: most positions that the model was made for.
    """
    if num_tokens > max_context:
        raise BadRequestError(
            f"Prompt and answer are {num_tokens:,} tokens but the model holds {max_context:,}. "
            "Plan shorter ones."
        )
    if num_tokens > found.longest_context or not found.requests_at_once:
        needed = num_tokens * found.kv_bytes_per_token
        raise BadRequestError(
            f"One request of {num_tokens:,} tokens needs {needed / GIB:.2f} GiB of KV cache but "
            f"the pool has {found.pool_bytes / GIB:.2f} GiB, which is "
            f"{found.longest_context:,} tokens. Plan shorter requests, a larger pool "
            "(--kv-cache-memory-bytes), smaller weights (--quantization) or a larger machine."
        )


def block_sizes(found: Capacity, num_tokens: int) -> list[BlockSizeRow]:
    """Return what other block sizes would change, with the same memory."""
    rows = []
    for size in BLOCK_SIZES:
        num_blocks = found.pool_bytes // (size * found.kv_bytes_per_token)
        rows.append(
            BlockSizeRow(
                block_size=size,
                num_blocks=num_blocks,
                wasted_tokens=-(num_tokens - 1) % size,
                requests_at_once=_at_once(num_blocks, size, num_tokens),
            )
        )
    return rows


def usable_bytes(machine: Machine) -> int:
    """Return what weights and pool may take: of this machine all that is free."""
    is_here = machine.name == "this"
    return machine.memory_bytes if is_here else int(USABLE_SHARE * machine.memory_bytes)


def _free_beside(prepared: PreparedProgram, machine: Machine) -> int:
    needed, usable = prepared.total_weight_bytes, usable_bytes(machine)
    if needed < usable:
        return usable - needed
    larger = [m.name for m in MACHINES.values() if usable_bytes(m) > needed]
    advice = f" They fit on {', '.join(larger)}." if larger else ""
    raise SettingError(
        f"The weights need {needed / GIB:.1f} GiB but {machine.title} has {usable / GIB:.1f} GiB "
        f"for them. Plan with --quantization int8 or int4, or with a larger machine.{advice}"
    )


def _cache(
    prepared: PreparedProgram, machine: Machine, config: EngineConfig, free: int
) -> CacheSettings:
    """The engine takes a share of this machine; a named one is planned whole."""
    program = prepared.program
    is_open = config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None
    if is_open and machine.name != "this":
        config = replace(config, kv_cache_memory_bytes=free)
    return resolve_cache(
        config,
        max_context=program.max_context,
        kv_groups=program.kv_groups,
        available=free,
    )


def _at_once(num_blocks: int, block_size: int, num_tokens: int) -> int:
    """The last token of an answer is never computed, so it takes no slot."""
    return num_blocks // max(1, -(-(num_tokens - 1) // block_size))
