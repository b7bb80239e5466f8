"""From settings that were left open to values, each with its reason.

Decides how much memory the KV cache gets and how long a sequence may be, from what the model needs
and the machine has free. Allocates nothing.

Invariant: the pool holds at least one sequence of `max_model_len` tokens, unless the caller asked
for a longer one; then requests that cannot fit are refused one by one.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.machine import GIB
from octavo.errors import SettingError
from octavo.executors.pages import KVType, bytes_per_token
from octavo.program.program import KVGroup

# What the cache takes by default: a quarter of what is free, but no more than a small server needs.
DEFAULT_SHARE = 0.25
DEFAULT_LIMIT = 1 * GIB
# To hold one whole context it may go so far.
CONTEXT_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The KV cache as it will be built. `reasons` are lines for the log."""

    kv_cache_dtype: KVType
    block_size: int
    num_blocks: int
    max_model_len: int
    reasons: tuple[str, ...]


def resolve_cache(
    config: EngineConfig, *, max_context: int, kv_groups: Ordered[KVGroup], available: int
) -> CacheSettings:
    """Return the cache for a model that can hold `max_context` tokens.

    kv_groups: what is kept per token. available: bytes that are free once the weights are loaded.
    Raises `SettingError` with the numbers.
    """
    dtype: KVType = "bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    bytes_per_block = bytes_per_token(kv_groups, dtype) * config.block_size
    wanted = config.max_model_len or max_context
    if wanted > max_context:
        raise SettingError(
            f"max_model_len is {wanted:,} but the model holds {max_context:,} tokens. Lower it."
        )
    num_blocks, reason = _num_blocks(config, wanted, bytes_per_block, available)
    held = num_blocks * config.block_size
    if config.max_model_len is None and held < wanted:
        reason += f"; that shortens the context from {wanted:,} to {held:,} tokens"
        wanted = held
    elif held < wanted:
        reason += f"; that holds {held:,} of the {wanted:,} tokens of max_model_len"
    size = num_blocks * bytes_per_block / GIB
    line = (
        f"KV cache: {num_blocks:,} blocks of {config.block_size} tokens, {size:.2f} GiB ({reason})"
    )
    return CacheSettings(
        kv_cache_dtype=dtype,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=wanted,
        reasons=(line,),
    )


def _num_blocks(
    config: EngineConfig, context: int, bytes_per_block: int, available: int
) -> tuple[int, str]:
    if config.num_gpu_blocks_override is not None:
        needed = config.num_gpu_blocks_override * bytes_per_block
        _check_memory("num_gpu_blocks_override", needed, available)
        return config.num_gpu_blocks_override, "num_gpu_blocks_override"
    if config.kv_cache_memory_bytes is not None:
        _check_memory("kv_cache_memory_bytes", config.kv_cache_memory_bytes, available)
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
        if num_blocks < 1:
            raise SettingError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes:,}, less than one block "
                f"of {bytes_per_block:,} bytes. Raise it or lower block_size."
            )
        return num_blocks, "kv_cache_memory_bytes"
    for_context = -(-context // config.block_size) * bytes_per_block
    budget = min(int(DEFAULT_SHARE * available), DEFAULT_LIMIT)
    if for_context > budget:
        budget = min(for_context, int(CONTEXT_SHARE * available))
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise SettingError(
            f"{available:,} bytes are free, too few for one KV block of {bytes_per_block:,}. "
            "Free memory or choose a smaller model."
        )
    return num_blocks, f"{available / GIB:.1f} GiB are free"


def _check_memory(setting: str, needed: int, available: int) -> None:
    if needed > available:
        raise SettingError(
            f"{setting} asks for {needed / GIB:.2f} GiB of KV cache but {available / GIB:.2f} GiB "
            "are free. Lower it, or leave it out for what fits."
        )
