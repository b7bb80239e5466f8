"""From a model reference and settings to a running engine.

Decides the order of starting: files, program, executor, cache, scheduler. It is the one place that
knows all of them; nothing here runs twice.

Invariant: whatever is wrong with model, settings or machine is raised before memory is taken for
weights or cache.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.engine import clock
from octavo.engine.backend import Backend, choose_backend
from octavo.engine.chat import ChatTemplate, encode_chat
from octavo.engine.engine import Engine
from octavo.engine.grammar import GrammarCompiler
from octavo.engine.intake import Intake, sampling_defaults
from octavo.engine.load import ModelFiles, open_model
from octavo.engine.machine import GIB, available_memory
from octavo.engine.resolve import CacheSettings, resolve_cache
from octavo.engine.text import TokenBytes
from octavo.errors import ChatTemplateError, SettingError
from octavo.executors.executor import Executor
from octavo.models.registry import WeightReader, build_program
from octavo.weights.source import TensorSource
from octavo.weights.tokenizer import Tokenizer


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
    files = open_model(config.model)
    program = build_program(files.config)
    weights = WeightReader(files.config, program, files.source)
    tokenizer = _tokenizer(config, files)
    backend = choose_backend(config, program)
    cache = resolve_cache(
        config,
        max_context=program.max_context,
        values_per_token=int(program.kv_bytes_per_token(element_size=1)),
        available=_free_beside(backend.weight_bytes(program, weights), available_memory()),
    )
    digest = _weights_digest(files.source)
    executor = backend.build(
        config, cache, program, weights, weights_digest=digest, clock=clock.monotonic
    )
    files.source.close()
    intake = Intake(
        tokenizer=tokenizer,
        vocab_size=program.vocab_size,
        max_model_len=cache.max_model_len,
        max_pool_tokens=cache.num_blocks * cache.block_size,
        seed=config.seed,
    )
    engine = Engine(
        executor=executor,
        scheduler=_scheduler(config, cache, executor.fingerprint),
        intake=intake,
        decoder=_decoder(tokenizer, program.vocab_size),
        clock=clock.monotonic,
        compiler=None if tokenizer is None else GrammarCompiler(tokenizer, program.vocab_size),
    )
    use_defaults = config.generation_config == "auto"
    return StartedEngine(
        engine=engine,
        tokenizer=tokenizer,
        chat=Chat(tokenizer, template),
        sampling_defaults=sampling_defaults(files.generation_config) if use_defaults else {},
        reasons=(_describe(files, executor, backend), *cache.reasons),
    )


def _scheduler(config: EngineConfig, cache: CacheSettings, fingerprint: str) -> Scheduler:
    blocks = BlockManager(
        cache.num_blocks,
        cache.block_size,
        fingerprint=fingerprint,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Scheduler(
        blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_chunk_tokens=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
    )


def _describe(files: ModelFiles, executor: Executor, backend: Backend) -> str:
    because = f", since {backend.reason}" if backend.reason else ""
    return f"{files.path.name} on the {executor.name} executor{because}"


def _free_beside(weight_bytes: int, available: int) -> int:
    """Return the bytes left once the weights are in memory."""
    if weight_bytes >= available:
        raise SettingError(
            f"The weights need {weight_bytes / GIB:.2f} GiB but {available / GIB:.2f} GiB are "
            "free. Free memory or choose a smaller model."
        )
    return available - weight_bytes


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
