"""How much memory the cache gets and how long a sequence may be, on machines described by files."""

import pytest

from octavo.config import EngineConfig
from octavo.engine.machine import GIB
from octavo.engine.resolve import DEFAULT_LIMIT, resolve_cache
from octavo.errors import SettingError
from octavo.program.program import KVGroup

MIB = 1 << 20


def resolve(available, *, max_context=2048, **settings):
    """A model of 1,024 values per token: 64 KiB per block of 32 in bfloat16."""
    return resolve_cache(
        EngineConfig(**settings),
        max_context=max_context,
        kv_groups=[KVGroup(layers=4, kv_heads=2, head_dim=64)],
        available=available,
    )


class TestPool:
    def test_a_quarter_of_what_is_free_by_default_and_no_more_than_the_limit(self):
        assert resolve(2 * GIB).num_blocks == GIB // 2 // (64 << 10)
        assert resolve(1000 * GIB).num_blocks == DEFAULT_LIMIT // (64 << 10)

    def test_half_of_what_is_free_where_the_context_needs_it(self):
        cache = resolve(10 * MIB)
        assert (cache.num_blocks, cache.max_model_len) == (64, 2048)

    @pytest.mark.case("V13")
    def test_a_context_slightly_too_large_is_shortened_and_the_line_says_so(self):
        """2,048 tokens take 4 MiB; half of 7 MiB is 3.5."""
        cache = resolve(7 * MIB)
        assert (cache.num_blocks, cache.max_model_len) == (56, 1792)
        (line,) = cache.reasons
        assert "56 blocks of 32 tokens" in line
        assert "shortens the context from 2,048 to 1,792 tokens" in line

    @pytest.mark.case("V13")
    def test_a_context_that_was_asked_for_stays_and_the_line_says_what_fits(self):
        cache = resolve(7 * MIB, max_model_len=2048)
        assert (cache.num_blocks, cache.max_model_len) == (56, 2048)
        assert "holds 1,792 of the 2,048 tokens of max_model_len" in cache.reasons[0]

    @pytest.mark.case("V13")
    def test_too_little_for_a_single_block_is_refused_with_the_numbers(self):
        with pytest.raises(SettingError, match=r"100,000 bytes are free.*65,536"):
            resolve(100_000)

    @pytest.mark.case("V13")
    def test_more_than_is_free_is_refused_with_the_numbers_and_the_setting(self):
        for settings in ({"kv_cache_memory_bytes": 3 * GIB}, {"num_gpu_blocks_override": 3 << 14}):
            (name,) = settings
            with pytest.raises(SettingError, match=rf"{name} asks for 3.00 GiB .* 1.50 GiB"):
                resolve(3 * GIB // 2, **settings)

    def test_a_given_number_of_blocks_or_bytes_is_kept(self):
        assert resolve(GIB, num_gpu_blocks_override=5).num_blocks == 5
        cache = resolve(GIB, kv_cache_memory_bytes=MIB, block_size=16, kv_cache_dtype="float32")
        assert (cache.num_blocks, cache.block_size, cache.kv_cache_dtype) == (16, 16, "float32")
        with pytest.raises(SettingError, match="less than one block of 65,536 bytes"):
            resolve(GIB, kv_cache_memory_bytes=1000)

    def test_a_context_beyond_the_models_is_refused(self):
        with pytest.raises(SettingError, match=r"max_model_len is 4,096 but the model holds 2,048"):
            resolve(GIB, max_model_len=4096)
        assert resolve(GIB, max_model_len=100).max_model_len == 100

    def test_int8_takes_half_the_memory_and_a_scale_per_token_and_head(self):
        """1,024 bytes and 4 layers x 2 heads x 2 scales of 4 bytes: 1,088 for 2,048."""
        cache = resolve(GIB, kv_cache_memory_bytes=1088 * 32 * 7, kv_cache_dtype="int8")
        assert cache.num_blocks == 7
        assert resolve(GIB, kv_cache_memory_bytes=1088 * 32 * 7).num_blocks == 3

    def test_auto_pages_are_bfloat16(self):
        assert resolve(GIB).kv_cache_dtype == "bfloat16"
