"""Which executor computes, and what it needs of the machine.

Decides between the native CPU library and the NumPy reference, by what the settings ask, the model
needs and the machine has; says why. Builds the one that was chosen.

Invariant: a setting that cannot be honoured is an error, never another setting in silence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram
from octavo.engine.machine import available_cpus
from octavo.engine.resolve import CacheSettings
from octavo.errors import SettingError, UnsupportedModelError
from octavo.executors.cpu import CPUExecutor, check_supported
from octavo.executors.executor import Executor
from octavo.executors.packing import FLOAT_TYPES, Scales
from octavo.executors.preparing import prepare
from octavo.executors.quantization import Quantization
from octavo.executors.reference import ReferenceExecutor
from octavo.models.registry import WeightReader
from octavo.native import library, why_missing
from octavo.program.program import Program


@dataclass(frozen=True, slots=True)
class Backend:
    """An executor that can be built. `reason` is set where it is not what a machine can do best.

    instruction_set: None for the reference. num_threads: that compute.
    """

    instruction_set: str | None
    num_threads: int
    dtype: type[np.floating]
    reason: str = ""
    quantization: Quantization | None = None
    scales: Scales = "group"

    def prepared(
        self, program: Program, weights: WeightReader, kv_element: float = 2.0
    ) -> PreparedProgram:
        """Return the program as it will run. kv_element: bytes of a number in the pages."""
        if self.instruction_set is not None:
            scales, quantization = self.scales, self.quantization
            return prepare(
                program, weights.dtype, scales, quantization=quantization, kv_element=kv_element
            )
        dtype = np.dtype(self.dtype)
        shapes = program.parameters.items()
        sizes = {name: dtype.itemsize * math.prod(shape) for name, shape in shapes}
        formats = {name: dtype.name for name, shape in shapes if len(shape) == 2}
        return PreparedProgram(program, sizes, formats, kv_element, dtype.itemsize)

    def weight_bytes(self, program: Program, weights: WeightReader) -> int:
        """Return what the weights take in memory once they are loaded."""
        return self.prepared(program, weights).total_weight_bytes

    def build(
        self,
        config: EngineConfig,
        cache: CacheSettings,
        program: Program,
        weights: WeightReader,
        *,
        weights_digest: str,
        clock: Callable[[], float],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Executor:
        """Load the weights and take the memory of the pool.

        meanwhile: called once while other threads do that, if they can.
        """
        if self.instruction_set is None:
            meanwhile()
            return ReferenceExecutor(
                program,
                weights,
                num_blocks=cache.num_blocks,
                block_size=cache.block_size,
                kv_dtype=cache.kv_cache_dtype,
                dtype=self.dtype,
                weights_digest=weights_digest,
                clock=clock,
            )
        return CPUExecutor(
            library,
            program,
            weights,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            kv_dtype=cache.kv_cache_dtype,
            max_rows=config.max_num_batched_tokens,
            max_positions=cache.max_model_len,
            instruction_set=self.instruction_set,
            num_threads=self.num_threads,
            quantization=self.quantization,
            scales=self.scales,
            weights_digest=weights_digest,
            clock=clock,
            meanwhile=meanwhile,
        )


def choose_backend(config: EngineConfig, program: Program) -> Backend:
    """Return the executor for a model; raises `SettingError` if it cannot be what was asked."""
    obstacle = _obstacle(config, program)
    if config.executor == "reference" or (config.executor == "auto" and obstacle):
        _check_reference(config)
        dtype = np.float64 if config.dtype == "float64" else np.float32
        reason = "" if config.executor == "reference" else obstacle
        return Backend(None, 1, dtype, reason)
    if obstacle:
        raise SettingError(f"The cpu executor cannot run here: {obstacle}.")
    return Backend(
        _instruction_set(config),
        config.num_threads or available_cpus(),
        np.float32,
        quantization=None if config.quantization == "none" else config.quantization,
        scales=config.weight_scales,
    )


def check_quantizable(config: EngineConfig, program: Program, weights: WeightReader) -> None:
    """Raise `SettingError` if there is nothing that `quantization` could change."""
    dtypes = {weights.dtype(name) for name, shape in program.parameters.items() if len(shape) > 1}
    if config.quantization != "none" and dtypes.isdisjoint(FLOAT_TYPES):
        raise SettingError(
            f"quantization {config.quantization}: the model is quantised already, as "
            f"{', '.join(sorted(dtypes))}. Leave the setting out, or use a file of floats."
        )


def _obstacle(config: EngineConfig, program: Program) -> str:
    """Return why the native library cannot run this, or ""."""
    if library is None:
        return why_missing
    if config.dtype != "auto":
        return f"dtype {config.dtype} is a setting of the reference executor"
    try:
        check_supported(program)
    except UnsupportedModelError as error:
        return str(error).rstrip(".")
    return ""


def _instruction_set(config: EngineConfig) -> str:
    assert library is not None
    usable: list[str] = library.instruction_sets()
    if config.instruction_set == "auto":
        return next(name for name in usable if name not in library.emulated)
    if config.instruction_set not in usable:
        raise SettingError(
            f"instruction_set {config.instruction_set} is not on this machine or not in this "
            f"build, which have {', '.join(usable)}."
        )
    return config.instruction_set


def _check_reference(config: EngineConfig) -> None:
    for name, neutral in (
        ("instruction_set", "auto"),
        ("num_threads", None),
        ("quantization", "none"),
        ("weight_scales", "group"),
    ):
        if getattr(config, name) != neutral:
            raise SettingError(
                f"{name} is a setting of the cpu executor, which does not run here. Leave it out."
            )
