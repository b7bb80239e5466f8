"""What a plan is about: a model's program and how its weights are stored.

Decides where both are read from: a directory's `config.json`, or a GGUF's header. Invariant: no
weights are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.cost.accounting import PreparedProgram
from octavo.engine.load import open_model, read_config
from octavo.executors.packing import FLOAT_TYPES, Scales
from octavo.executors.preparing import prepare
from octavo.executors.quantization import Quantization
from octavo.models.registry import WeightReader, build_program
from octavo.program.program import Program
from octavo.weights.fetch import resolve

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model. dtype_of: how each parameter is stored."""

    name: str
    program: Program
    dtype_of: Callable[[str], str]

    @property
    def is_float(self) -> bool:
        """Whether every matrix is stored as floats, so that `quantization` concerns it."""
        shapes = self.program.parameters.items()
        return all(self.dtype_of(name) in FLOAT_TYPES for name, shape in shapes if len(shape) == 2)

    def prepared(
        self, scales: Scales, *, quantization: Quantization | None, kv_element: float
    ) -> PreparedProgram:
        """Return the program as the CPU executor would run it."""
        return prepare(
            self.program,
            self.dtype_of,
            scales,
            quantization=quantization,
            kv_element=kv_element,
        )

    def as_floats(self) -> "Subject":
        """Return the same network with weights of 16 bits, whatever the file has."""
        return Subject(self.name, self.program, lambda _: "BF16")


def read_subject(reference: str) -> Subject:
    """Return a model's program; raises as `open_model` does."""
    if (Path(resolve(reference)) / "config.json").exists():
        config = read_config(reference)
        dtype = _TYPES.get(config.dtype or "", "F32")
        return Subject(reference, build_program(config), lambda _: dtype)
    files = open_model(reference)
    program = build_program(files.config)
    reader = WeightReader(files.config, program, files.source)
    types = {name: reader.dtype(name) for name in program.parameters}
    files.source.close()
    return Subject(reference, program, types.__getitem__)
