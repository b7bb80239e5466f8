"""From a model reference and settings to a running engine.

Decides which reader, program, tokenizer and executor belong to a model. It is the one place that
knows all of them; nothing here runs twice.

Invariant: whatever is wrong with model, settings or machine is raised before memory is taken for
weights or cache.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError
from octavo.models.config import ModelConfig
from octavo.models.registry import (
    read_gguf_config,
    read_huggingface_config,
)
from octavo.weights.fetch import cache_folder, resolve
from octavo.weights.gguf import open_gguf
from octavo.weights.safetensors import open_safetensors
from octavo.weights.source import TensorSource
from octavo.weights.tokenizer import Encodes, Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: its numbers and named tensors, nothing of them computed yet.

    tokenizer: makes the model's own tokenizer, or returns None if it brings none.
    """

    path: Path
    config: ModelConfig
    source: TensorSource
    generation_config: Json
    tokenizer: Callable[[Encodes], Tokenizer | None]


def read_config(reference: str) -> ModelConfig:
    """Return a model's numbers; of a directory nothing but its config.json is read."""
    path = resolve(reference)
    if path.is_dir() and (path / "config.json").exists():
        return read_huggingface_config(_read_json(path / "config.json"))
    return open_model(str(path)).config


def open_model(reference: str) -> ModelFiles:
    """Find, and if need be fetch, a model and read its headers.

    Raises ModelNotFoundError, FetchError, ModelFileError or UnsupportedModelError.
    """
    path = resolve(reference)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            return _open_gguf(ggufs[0])
        return _open_directory(path)
    if path.suffix == ".safetensors":
        return _open_directory(path.parent)
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelFiles:
    source = open_gguf(path)
    return ModelFiles(
        path=path,
        config=read_gguf_config(source.metadata, source),
        source=source,
        generation_config={},
        tokenizer=lambda encodes: Tokenizer.from_gguf(
            source.metadata,
            cache=cache_folder() / "tokenizers",
            encodes=encodes,
            reopen=lambda: open_gguf(path).metadata,
        ),
    )


def _open_directory(path: Path) -> ModelFiles:
    config = read_huggingface_config(_read_json(path / "config.json"))
    generation = path / "generation_config.json"
    has_tokenizer = (path / "tokenizer.json").exists()
    return ModelFiles(
        path=path,
        config=config,
        source=open_safetensors(path),
        generation_config=_read_json(generation) if generation.exists() else {},
        tokenizer=lambda encodes: (
            Tokenizer.from_directory(path, encodes=encodes) if has_tokenizer else None
        ),
    )


def _read_json(path: Path) -> Json:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(
            f"{path.parent} has no {path.name}. Give a directory in the Hugging Face layout, or "
            "the path of a .gguf file."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} holds a {type(values).__name__}, not an object.")
    return values
