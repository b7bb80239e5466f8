"""Float weights become integers while they are loaded, and what that costs is measured."""

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.start import start_engine
from octavo.errors import SettingError
from octavo.executors.quantization import Losses, split_floats, tables_of
from octavo.llm import LLM
from octavo.request import SamplingParams
from tests.executors.checkpoints import TINY, Piece, batch
from tests.executors.native import (
    SCALES,
    SETS,
    RandomWeights,
    bits,
    distance,
    native,
    needs_library,
    network,
    token_ids,
)


def restored(rows: np.ndarray) -> np.ndarray:
    """What `split_floats` stands for."""
    nibbles, scales, minima = split_floats(rows)
    groups = nibbles * scales[..., None].astype(np.float32) + minima[..., None].astype(np.float32)
    return groups.reshape(len(rows), -1)[:, : rows.shape[1]]


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 96])
def test_no_weight_is_further_off_than_a_step_of_its_group(inputs):
    rows = np.random.default_rng(0).standard_normal((7, inputs), np.float32)
    steps = np.ptp(rows, axis=1)[:, None] / 15
    # A narrower range may cut the outermost weights by a tenth of it; the minimum is a half.
    bound = 0.1 * 15 * steps + steps + np.abs(rows).max() * 2.0**-11
    assert (np.abs(restored(rows) - rows) <= bound).all()


def test_normal_weights_lose_less_than_by_rounding_to_their_whole_range():
    rows = np.random.default_rng(0).standard_normal((64, 320), np.float32)
    groups = rows.reshape(64, -1, 32)
    step = np.ptp(groups, axis=-1, keepdims=True) / 15
    whole = np.rint((groups - groups.min(-1, keepdims=True)) / step) * step
    plain = np.square(whole + groups.min(-1, keepdims=True) - groups).mean()
    assert np.square(restored(rows) - rows).mean() < plain


def test_equal_weights_zeros_and_tiny_ones_survive():
    rows = np.zeros((4, 64), np.float32)
    rows[1] = 0.25
    rows[2] = 1e-9
    rows[3, 5] = -1.0
    found = restored(rows)
    assert np.array_equal(found[:2], rows[:2])
    assert np.abs(found[2:] - rows[2:]).max() <= 0.11


@needs_library
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("isa", SETS)
def test_a_quantised_network_does_nearly_what_it_did(isa, quantization, scales):
    program = network(width=128, inner=192)
    weights = RandomWeights(program)
    step = batch(Piece(token_ids(60), 0, 60, range(2)))
    exact = native(program, weights, isa).logits(step)
    run = native(program, weights, isa, quantization=quantization, scales=scales)
    found = run.logits(step)
    # 4 bits: each weight is off by a tenth of its deviation, and so is each product.
    assert 0 < distance(found, exact) < (0.1 if quantization == "int8" else 0.5)
    (note,) = run.notes
    lost = float(note.split(" are ")[1].split("%")[0])
    assert 0.3 < lost < (1.2 if quantization == "int8" else 10)
    assert f"to {quantization} while loading" in note
    assert quantization in run.fingerprint


@needs_library
def test_the_table_and_the_head_keep_eight_bits():
    program = network()
    assert tables_of(program) == {"table", "head"}
    run = native(program, RandomWeights(program), SETS[0], quantization="int4")
    sizes = {"table": 200 * 64, "head": 200 * 64}
    assert sum(sizes.values()) < sum(array.nbytes for array in run._kept if array.dtype == np.uint8)


@needs_library
def test_integers_of_a_file_stay_as_they_are():
    program = network(width=64)
    step = batch(Piece(token_ids(20), 0, 20, range(2)))
    weights = RandomWeights(program, "Q8_0")
    plain = native(program, weights, SETS[0])
    asked = native(program, weights, SETS[0], quantization="int4")
    assert bits(plain.logits(step)) == bits(asked.logits(step))
    assert asked.notes == ()


@needs_library
def test_an_engine_says_what_was_lost():
    with LLM(str(TINY / "llama"), quantization="int8", num_gpu_blocks_override=16) as llm:
        assert any("Quantised 22 matrices to int8" in reason for reason in llm.reasons)
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        assert len(llm.generate({"prompt_token_ids": [1, 2]}, params)[0].outputs[0].token_ids) == 4


def test_the_reference_executor_quantises_nothing():
    config = EngineConfig(model=str(TINY / "llama"), executor="reference", quantization="int8")
    with pytest.raises(SettingError, match="quantization is a setting of the cpu executor"):
        start_engine(config)


@needs_library
@pytest.mark.real
def test_a_model_that_is_quantised_already_is_refused():
    with pytest.raises(SettingError, match=r"quantised already, as Q4_1, Q8_0\. Leave"):
        start_engine(EngineConfig(quantization="int4"))


def test_an_unknown_quantization_is_refused():
    with pytest.raises(SettingError, match="quantization must be one of none, int8, int4"):
        EngineConfig(quantization="fp8")  # type: ignore[arg-type]


def test_nothing_quantised_says_nothing_and_zeros_lose_nothing():
    losses = Losses()
    assert list(losses.describe("int8")) == []
    losses.add("a", np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
    (line,) = losses.describe("int8")
    assert "0.00% off" in line
