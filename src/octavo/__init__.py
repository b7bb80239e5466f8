"""Octavo: an LLM serving engine for the machine you have.

The public names are imported on first use, so that `import octavo` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.pooling import EmbeddingOutput
    from octavo.errors import OctavoError
    from octavo.llm import LLM
    from octavo.request import (
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
    )

__version__ = "0.1.0"

_MODULES = {
    "LLM": "octavo.llm",
    "CompletionOutput": "octavo.request",
    "EmbeddingOutput": "octavo.engine.pooling",
    "EngineConfig": "octavo.config",
    "OctavoError": "octavo.errors",
    "RequestOutput": "octavo.request",
    "SamplingParams": "octavo.request",
    "StructuredOutputs": "octavo.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
