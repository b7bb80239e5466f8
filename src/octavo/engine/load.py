"""From a model reference and settings to a running engine.

Decides which reader, program, tokenizer and executor belong to a model. It is the one place that
knows all of them; nothing here runs twice.

Invariant: whatever is wrong with model, settings or machine is raised before memory is taken for
weights or cache.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.engine import clock
from octavo.engine.chat import ChatTemplate, encode_chat
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake, sampling_defaults
from octavo.engine.resolve import GIB, available_memory, resolve_cache
from octavo.engine.text import TokenBytes
from octavo.errors import ChatTemplateError, ModelFileError, SettingError
from octavo.executors.reference import ReferenceExecutor
from octavo.models.config import ModelConfig
from octavo.models.registry import (
    WeightReader,
    build_program,
    read_gguf_config,
    read_huggingface_config,
)
from octavo.program.program import Program
from octavo.weights.fetch import cache_folder, resolve
from octavo.weights.gguf import open_gguf
from octavo.weights.safetensors import open_safetensors
from octavo.weights.source import TensorSource
from octavo.weights.tokenizer import Tokenizer

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
    tokenizer: Callable[[], Tokenizer | None]


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
        tokenizer=lambda: Tokenizer.from_gguf(source.metadata, cache=cache_folder() / "tokenizers"),
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
        tokenizer=lambda: Tokenizer.from_directory(path) if has_tokenizer else None,
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


class Chat:
    """Turns conversations into token ids with one model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer | None, override: str | None) -> None:
        self._tokenizer = tokenizer
        self._override = override

    @property
    def has_template(self) -> bool:
        """Whether `encode` can work at all."""
        if self._tokenizer is None:
            return False
        return self._override is not None or bool(self._tokenizer.chat_templates)

    def encode(
        self, messages: Any, *, tools: Any = None, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """Return the prompt's ids; raises ChatTemplateError. Options are those of `encode_chat`."""
        if self._tokenizer is None:
            raise ChatTemplateError("This model came without a tokenizer, so it cannot chat.")
        template = ChatTemplate.of(
            self._tokenizer,
            override=chat_template or self._override,
            with_tools=bool(tools),
            now=clock.now(),
        )
        return encode_chat(self._tokenizer, template, messages, tools=tools, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """A running engine and what belongs to it. `reasons` says how open settings were resolved."""

    engine: Engine
    tokenizer: Tokenizer | None
    chat: Chat
    sampling_defaults: Mapping[str, Any]
    reasons: tuple[str, ...]


def start_engine(config: EngineConfig) -> StartedEngine:
    """Load a model and start its engine in this process."""
    template = _read_template(config.chat_template)
    dtype = np.float64 if config.dtype == "float64" else np.float32
    files = open_model(config.model)
    program = build_program(files.config)
    weights = WeightReader(files.config, program, files.source)
    tokenizer = _tokenizer(config, files)
    cache = resolve_cache(
        config,
        max_context=program.max_context,
        values_per_token=int(program.kv_bytes_per_token(element_size=1)),
        available=_free_beside_weights(program, np.dtype(dtype).itemsize, available_memory()),
    )
    executor = ReferenceExecutor(
        program,
        weights,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        kv_dtype=cache.kv_cache_dtype,
        dtype=dtype,
        weights_digest=_weights_digest(files.source),
        clock=clock.monotonic,
    )
    files.source.close()
    scheduler = Scheduler(
        BlockManager(
            cache.num_blocks,
            cache.block_size,
            fingerprint=executor.fingerprint,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_chunk_tokens=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
    )
    intake = Intake(
        tokenizer=tokenizer,
        vocab_size=program.vocab_size,
        max_model_len=cache.max_model_len,
        seed=config.seed,
    )
    engine = Engine(
        executor=executor,
        scheduler=scheduler,
        intake=intake,
        decoder=_decoder(tokenizer, program.vocab_size),
        clock=clock.monotonic,
    )
    use_defaults = config.generation_config == "auto"
    return StartedEngine(
        engine=engine,
        tokenizer=tokenizer,
        chat=Chat(tokenizer, template),
        sampling_defaults=sampling_defaults(files.generation_config) if use_defaults else {},
        reasons=(f"{files.path.name} on the {executor.name} executor", *cache.reasons),
    )


def _free_beside_weights(program: Program, item_bytes: int, available: int) -> int:
    """Return the bytes left once the executor holds every parameter in `item_bytes`."""
    needed = item_bytes * sum(map(math.prod, program.parameters.values()))
    if needed >= available:
        raise SettingError(
            f"The weights need {needed / GIB:.2f} GiB but {available / GIB:.2f} GiB are free. "
            "Free memory or choose a smaller model."
        )
    return available - needed


def _weights_digest(source: TensorSource) -> str:
    """Return a digest that tells apart models of one architecture, without reading all of them.

    It covers each tensor's name, shape, type and first bytes: training changes every tensor.
    """
    digest = hashlib.sha256()
    for name, info in sorted(source.tensors.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        digest.update(source.raw(name)[:4096].tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PaddedDecoder:
    """A tokenizer's bytes for a model whose vocabulary is larger: ids without a token add none."""

    tokenizer: Tokenizer

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Ids that are not text."""
        return self.tokenizer.special_ids

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.tokenizer.token_bytes(token_id) if token_id < self.tokenizer.vocab_size else b""


def _decoder(tokenizer: Tokenizer | None, vocab_size: int) -> TokenBytes | None:
    if tokenizer is None or vocab_size <= tokenizer.vocab_size:
        return tokenizer
    return PaddedDecoder(tokenizer)


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    if config.tokenizer is None:
        return files.tokenizer()
    path = Path(config.tokenizer)
    return Tokenizer.from_directory(path.parent if path.is_file() else path)


def _read_template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"chat_template: cannot read {name}: {error}.") from None
