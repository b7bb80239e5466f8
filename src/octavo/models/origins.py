"""Where a program's parameters are in a file, and how the stored numbers become them.

Decides names and transforms from a family's table. Knows no program and reads no numbers.
Invariant: a transform keeps a tensor's shape, so shapes can be checked before anything is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from octavo.models.config import ModelConfig
from octavo.models.fields import Fields
from octavo.models.source import Float32, TensorSource
from octavo.program.program import Program


class Names(NamedTuple):
    """One weight's name in either kind of file, without the layer and without ".weight"."""

    huggingface: str
    gguf: str


@dataclass(frozen=True, slots=True)
class Origin:
    """One parameter's tensor.

    interleaved_heads: rows are stored with the two halves of each of so many heads interleaved, as
    the GGUF converter does for Llama; 0 where they are not. add: to be added to every number.
    """

    tensor: str
    interleaved_heads: int = 0
    add: float = 0.0

    def read(self, source: TensorSource) -> Float32:
        """Return the parameter's values."""
        values = self.arrange(source.float32(self.tensor))
        return values + values.dtype.type(self.add) if self.add else values

    def arrange(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return a tensor's rows, numbers or stored bytes, in the order that the program wants."""
        if not self.interleaved_heads:
            return rows
        halves = rows.reshape(self.interleaved_heads, -1, 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)


class Family(NamedTuple):
    """What a family file gives: how to read its numbers, its program, and its names."""

    read_huggingface: Callable[[Fields], ModelConfig]
    read_gguf: Callable[[Fields, TensorSource], ModelConfig]
    build: Callable[[ModelConfig], Program]
    origin: Callable[[ModelConfig, str], Origin]


def tensor_name(config: ModelConfig, parameter: str, names: Mapping[str, Names]) -> str:
    """Return the tensor that holds a parameter such as `layers.3.q_bias`."""
    *scope, stem = parameter.split(".")
    kind = "bias" if stem.endswith("_bias") else "weight"
    name = getattr(names[stem.removesuffix("_bias")], config.naming)
    within = {"huggingface": "model.layers", "gguf": "blk"}[config.naming]
    return ".".join([within, scope[1], name, kind] if scope else [name, kind])
