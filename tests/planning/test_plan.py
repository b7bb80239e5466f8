"""Plans: memory, latency, formats, from numbers alone."""

from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.cost.hardware import MACHINES, Machine
from octavo.errors import BadRequestError, InvalidParameterError, SettingError
from octavo.planning.capacity import USABLE_SHARE
from octavo.planning.latency import Lengths, batch_sizes
from octavo.planning.plan import Plan, make_plan
from tests.planning.subjects import subject

LENGTHS = Lengths(prompt_tokens=512, output_tokens=128)
L4 = MACHINES["l4"]


def plan(
    machine: Machine = L4, lengths: Lengths = LENGTHS, dtype: str = "BF16", **settings: object
) -> Plan:
    return make_plan(subject(dtype), machine, EngineConfig.from_dict(settings), lengths)


def test_memory_is_weights_and_whole_blocks() -> None:
    found = plan().capacity
    usable = int(USABLE_SHARE * L4.memory_bytes)
    block = 32 * found.kv_bytes_per_token
    assert found.kv_bytes_per_token == 2 * 16 * 8 * 64 * 2
    assert found.num_blocks == (usable - found.weight_bytes) // block
    assert found.pool_bytes == found.num_blocks * block
    # 639 tokens are computed of 640, in 20 blocks.
    assert found.requests_at_once == found.num_blocks // 20


def test_weights_take_two_bytes_each_in_bfloat16_and_less_quantised() -> None:
    rows = {row.name: row for row in plan().formats}
    assert list(rows) == ["bf16", "int8", "int4"]
    parameters = sum(
        shape[0] * shape[1] for shape in subject().program.parameters.values() if len(shape) == 2
    )
    assert rows["bf16"].weight_bytes == pytest.approx(2 * parameters, rel=0.01)
    # The default scales come in groups: 2 bytes for each 32 weights.
    assert rows["int8"].weight_bytes == pytest.approx(parameters * 34 / 32, rel=0.01)
    assert rows["int4"].weight_bytes < 0.7 * parameters
    each = [rows[name].inter_token for name in ("bf16", "int8", "int4")]
    assert each == sorted(each, reverse=True)


def test_a_quantised_file_is_planned_as_it_is_stored() -> None:
    found = plan(dtype="Q4_1")
    assert found.formats[0].name == "as stored"
    assert found.formats[0].weight_bytes == found.capacity.weight_bytes


def test_longer_prompts_and_slower_machines_take_longer() -> None:
    short, long = plan(), plan(lengths=Lengths(prompt_tokens=4096, output_tokens=128))
    assert short.ttft < long.ttft
    assert plan(MACHINES["h100"]).ttft < short.ttft


def test_throughput_grows_with_the_batch_and_so_does_latency() -> None:
    rows = plan().rows
    assert [row.batch for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    for name in ("tokens_per_second", "inter_token", "decode_seconds", "intensity"):
        values = [getattr(row, name) for row in rows]
        assert values == sorted(values)
    assert rows[0].bound == "memory"
    assert all(0 < row.bandwidth_share <= L4.efficiency.memory for row in rows)


def test_a_stream_alone_waits_for_nobody() -> None:
    row = plan().rows[0]
    assert row.inter_token == row.decode_seconds


def test_the_knee_is_one_row_and_where_throughput_per_latency_peaks() -> None:
    found = plan(max_num_seqs=256)
    assert [row.batch for row in found.rows if row.is_knee] == [found.knee]
    power = {row.batch: row.batch / row.decode_seconds**2 for row in found.rows}
    assert found.knee == max(power, key=power.__getitem__)
    assert found.knee > 1


def test_larger_blocks_waste_more_of_the_last_one() -> None:
    rows = plan(lengths=Lengths(prompt_tokens=500, output_tokens=101)).block_sizes
    assert {row.block_size: row.wasted_tokens for row in rows} == {
        16: 8,
        32: 8,
        64: 40,
        128: 40,
        256: 168,
    }
    at_once = [row.requests_at_once for row in rows]
    assert at_once == sorted(at_once, reverse=True)


def test_the_last_token_of_an_answer_takes_no_slot() -> None:
    found = plan(lengths=Lengths(prompt_tokens=513, output_tokens=128))
    assert found.capacity.requests_at_once == found.capacity.num_blocks // 20


def test_settings_are_planned() -> None:
    wide = plan(kv_cache_dtype="float32")
    assert wide.capacity.kv_bytes_per_token == 2 * plan().capacity.kv_bytes_per_token
    # A byte, and a scale of four for each token and head.
    assert plan(kv_cache_dtype="int8").capacity.kv_bytes_per_token == 2 * 16 * 8 * (64 + 4)
    assert plan(num_gpu_blocks_override=40).max_batch == 2
    assert plan(max_num_seqs=3).max_batch == 3
    assert plan(max_model_len=1000).capacity.longest_context == 1000


def test_batch_sizes_end_with_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(8) == [1, 2, 4, 8]


# --- what cannot be -----------------------------------------------------------------------------


def test_weights_that_do_not_fit_name_what_would() -> None:
    with pytest.raises(SettingError, match=r"NVIDIA L4.*--quantization.*They fit on a100") as said:
        make_plan(subject(num_hidden_layers=400), L4, EngineConfig(), LENGTHS)
    assert "l4," not in str(said.value)


def test_a_format_that_does_not_fit_is_shown_as_such() -> None:
    small = replace(L4, memory_bytes=2_000_000_000)
    rows = {row.name: row for row in plan(small, quantization="int4").formats}
    assert rows["bf16"].pool_tokens is None
    assert rows["int4"].pool_tokens


def test_a_request_longer_than_the_model_is_an_error_with_both_numbers() -> None:
    with pytest.raises(BadRequestError, match=r"9,128 tokens but the model holds 8,192"):
        plan(lengths=Lengths(prompt_tokens=9000, output_tokens=128))


def test_a_request_larger_than_the_pool_is_an_error_that_says_what_would_help() -> None:
    with pytest.raises(BadRequestError, match=r"640 tokens needs .*320 tokens.*--quantization"):
        plan(num_gpu_blocks_override=10)


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens"])
def test_empty_requests_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be at least 1, not 0"):
        plan(lengths=replace(LENGTHS, **{name: 0}))


def test_quantising_what_is_quantised_is_refused() -> None:
    with pytest.raises(SettingError, match="quantised already"):
        plan(dtype="Q4_1", quantization="int8")
