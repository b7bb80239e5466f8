"""From a model file to a program and its weights.

Decides which family an architecture belongs to, and whether a file's tensors are the ones that its
configuration promises. Knows no format: it takes mappings, and anything like a `TensorSource`.
Invariant: a parameter is read only after every tensor's presence and shape have been checked.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelFileError, UnsupportedModelError, nearest, shorten
from octavo.models import gemma, llama
from octavo.models.config import ModelConfig
from octavo.models.fields import Fields
from octavo.models.origins import Family, Origin
from octavo.models.source import Float32, TensorSource
from octavo.program.program import Program

HUGGINGFACE: Mapping[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": llama.FAMILY,
    "Qwen2ForCausalLM": llama.FAMILY,
    "Qwen3ForCausalLM": llama.FAMILY,
    "Gemma3ForCausalLM": gemma.FAMILY,
}
GGUF: Mapping[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "gemma3": gemma.FAMILY,
}

# Tensors of a layer that hold nothing of their own: rotary tables that old converters wrote.
_DERIVED = ("rotary_emb.inv_freq", "attn_rot_embd.weight")


def read_huggingface_config(values: Mapping[str, object]) -> ModelConfig:
    """Return the numbers of a parsed `config.json`.

    Raises `UnsupportedModelError` for an architecture that Octavo does not know, and
    `ModelFileError` for numbers that cannot be.
    """
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = _family(name, HUGGINGFACE, "config.json's architectures")
    return family.read_huggingface(Fields(values, str(name)))


def read_gguf_config(metadata: Mapping[str, object], source: TensorSource) -> ModelConfig:
    """Return the numbers of GGUF metadata and, where only they tell, of the tensors beside it.

    Raises as `read_huggingface_config` does.
    """
    name = metadata.get("general.architecture")
    family = _family(name, GGUF, "general.architecture")
    return family.read_gguf(Fields(metadata, str(name), f"{name}."), source)


def build_program(config: ModelConfig) -> Program:
    """Return the plain program of a model; `octavo.program.fuse` may make it faster."""
    return _family_of(config).build(config)


def origins(config: ModelConfig, parameters: Iterable[str]) -> dict[str, Origin]:
    """Return where each parameter of the program comes from."""
    family = _family_of(config)
    return {parameter: family.origin(config, parameter) for parameter in parameters}


class WeightReader:
    """Reads a program's parameters from a file: a function from a name to float32 values.

    Raises `ModelFileError` if a tensor is missing or has another shape, `UnsupportedModelError` if
    a layer has a tensor that the program would ignore: it is not the network it says it is.
    """

    def __init__(self, config: ModelConfig, program: Program, source: TensorSource) -> None:
        self._source = source
        self._origins = origins(config, program.parameters)
        for parameter, origin in self._origins.items():
            _check_shape(origin.tensor, program.parameters[parameter], source)
        _check_extra({origin.tensor for origin in self._origins.values()}, config, source)

    def __call__(self, parameter: str) -> Float32:
        """Return a parameter's values in the program's shape."""
        return self._origins[parameter].read(self._source)

    def dtype(self, parameter: str) -> str:
        """Return how a parameter's numbers are stored, by GGUF's names."""
        return str(self._source.tensors[self._origins[parameter].tensor].dtype)

    def stored_rows(self, parameter: str) -> NDArray[np.uint8]:
        """Return a matrix as its file has it, (outputs, bytes per row), in the program's order."""
        origin = self._origins[parameter]
        num_rows = self._source.tensors[origin.tensor].shape[0]
        return origin.arrange(self._source.raw(origin.tensor).reshape(num_rows, -1))

    def release(self, parameter: str) -> None:
        """Give back the memory of a matrix's stored bytes, once they are packed."""
        self._source.release(self._origins[parameter].tensor)


def _family(name: object, known: Mapping[str, Family], field: str) -> Family:
    if not isinstance(name, str):
        raise ModelFileError(f"{field} is {shorten(name)}; it must name the model's architecture.")
    if name not in known:
        raise UnsupportedModelError(
            f"Octavo does not know the architecture {shorten(name)}; it knows {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    return known[name]


def _family_of(config: ModelConfig) -> Family:
    known = GGUF if config.naming == "gguf" else HUGGINGFACE
    return _family(config.architecture, known, "architecture")


def _check_shape(tensor: str, shape: tuple[int, ...], source: TensorSource) -> None:
    if tensor not in source.tensors:
        raise ModelFileError(
            f"The model file has no tensor {tensor}, which its configuration needs as {shape}."
            f"{nearest(tensor, source.tensors)}"
        )
    stored = tuple(source.tensors[tensor].shape)
    if stored != shape:
        raise ModelFileError(f"{tensor} is {stored}, but the model's configuration needs {shape}.")


def _check_extra(used: set[str], config: ModelConfig, source: TensorSource) -> None:
    layer = "blk." if config.naming == "gguf" else "model.layers."
    for tensor in source.tensors:
        if tensor.startswith(layer) and tensor not in used and not tensor.endswith(_DERIVED):
            raise UnsupportedModelError(
                f"The model file has a tensor {shorten(tensor)}, for which a {config.architecture} "
                f"of {len(config.layers)} layers with this configuration has no use."
            )
