"""Rotary frequencies: radians per position of each pair of a head's elements.

Decides how the scalings of published models change them, and how both file formats spell that.
Knows nothing of heads or layers.

Invariant: every frequency is a positive number rounded to float32.
"""

import math
from collections.abc import Iterable

import numpy as np

from octavo.errors import ModelFileError
from octavo.models.fields import Fields
from octavo.models.source import TensorSource

Frequencies = tuple[float, ...]


def frequencies(head_dim: int, theta: float, scaling: Fields) -> Frequencies:
    """Return theta^(-2i / head_dim) for pair i, scaled as `scaling` says (`rope_type` and its own).

    Raises `UnsupportedModelError` for a scaling other than default, linear and llama3.
    """
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    name = "rope_type" if scaling.get("rope_type") is not None else "type"
    scaling.refuse(name, "default", "linear", "llama3")
    kind = scaling.get(name)
    if kind == "linear":
        factor = scaling.number("factor")
        return _rounded(f / factor for f in plain)
    if kind == "llama3":
        return _llama3(plain, scaling)
    return _rounded(plain)


def _llama3(plain: list[float], scaling: Fields) -> Frequencies:
    """Slow pairs by `factor`, leave fast ones, and blend between two wavelengths.

    As published with Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783) in its reference code.
    """
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    trained = scaling.integer("original_max_position_embeddings", 1 << 26)
    if low >= high:
        raise scaling.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")

    def scaled(frequency: float) -> float:
        turns = trained * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - share) * frequency / factor + share * frequency

    return _rounded(map(scaled, plain))


def huggingface_rope(
    fields: Fields, layer_type: str | None = None, default_theta: float = 10_000.0
) -> tuple[float, Fields]:
    """Return theta and the scaling's fields, from `rope_parameters` or its two older fields.

    layer_type: whose settings to read where `rope_parameters` has some for each type of layer.
    """
    if not fields.mapping("rope_parameters"):
        return fields.number("rope_theta", default_theta), fields.within("rope_scaling")
    settings = fields.within("rope_parameters")
    if layer_type is not None and settings.get(layer_type) is not None:
        settings = settings.within(layer_type)
    settings.refuse("partial_rotary_factor", 1)
    return settings.number("rope_theta", default_theta), settings


def gguf_frequencies(fields: Fields, source: TensorSource, head_dim: int) -> Frequencies:
    """Return the frequencies of GGUF metadata; `rope_freqs.weight` divides each by a factor."""
    theta = fields.number("rope.freq_base", 10_000.0)
    fields.refuse("rope.scaling.type", "none", "linear")
    plain = frequencies(head_dim, theta, Fields({}, fields.architecture))
    if fields.get("rope.scaling.type") == "linear":
        factor = fields.number("rope.scaling.factor", 1.0)
        plain = _rounded(f / factor for f in plain)
    if "rope_freqs.weight" not in source.tensors:
        return plain
    shape = source.tensors["rope_freqs.weight"].shape
    if shape != (head_dim // 2,):
        raise ModelFileError(
            f"rope_freqs.weight is {shape}; heads of {head_dim} need half as many."
        )
    factors = source.float32("rope_freqs.weight")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError("rope_freqs.weight holds a factor that is not a positive number.")
    return _rounded(f / float(factor) for f, factor in zip(plain, factors, strict=True))


def _rounded(values: Iterable[float]) -> Frequencies:
    return tuple(float(np.float32(value)) for value in values)
