import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.rope import frequencies
from tests.models.sources import ArraySource, from_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaled(theta=500_000.0, head_dim=128, **scaling):
    return frequencies(head_dim, theta, Fields(scaling, "LlamaForCausalLM"))


def test_default_is_a_geometric_series():
    assert scaled(theta=10_000.0, head_dim=4) == (1.0, float(np.float32(0.01)))


def test_linear_scaling_divides():
    plain, slow = scaled(), scaled(rope_type="linear", factor=4.0)
    assert slow == tuple(frequency / 4 for frequency in plain)
    assert scaled(type="linear", factor=4.0) == slow  # the old name of the field


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    plain, blended = np.array(scaled()), np.array(scaled(**LLAMA3))
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    assert short.any()
    assert long.any()
    np.testing.assert_array_equal(blended[short], plain[short])
    np.testing.assert_array_equal(blended[long], plain[long] / 8)
    ratio = (blended / plain)[~short & ~long]
    assert ((ratio > 1 / 8) & (ratio < 1) & (np.diff(ratio, prepend=1) < 0)).all()


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "LINEAR", 3])
def test_unknown_scaling_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="rope_type is"):
        scaled(rope_type=kind)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", None),
        ("factor", 0),
        ("factor", "8"),
        ("high_freq_factor", 1.0),
        ("low_freq_factor", 9.0),
        ("original_max_position_embeddings", -1),
    ],
)
def test_impossible_scaling_is_refused(field, value):
    with pytest.raises(ModelFileError, match=r"factor is|original_max"):
        scaled(**LLAMA3 | {field: value})


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        (np.ones(5, np.float32), r"rope_freqs.weight is \(5,\)"),
        (np.array([1, 0, 1, 1], np.float32), "not a positive number"),
        (np.array([1, np.nan, 1, 1], np.float32), "not a positive number"),
    ],
)
def test_impossible_rotary_factors_of_gguf_are_refused(factors, problem):
    with pytest.raises(ModelFileError, match=problem):
        from_gguf("llama", ArraySource({"rope_freqs.weight": factors}))
