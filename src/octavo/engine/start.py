"""From a model reference and settings to a running engine.

Decides the order of starting: files, program, executor, cache, scheduler. It is the one place that
knows all of them; nothing here runs twice.

Invariant: whatever is wrong with model, settings or machine is raised before memory is taken for
weights or cache, but for a damaged tokenizer's merges, which are read beside the weights.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from octavo.config import EngineConfig
from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.core.steering import StepCost
from octavo.cost.predictor import StepPredictor
from octavo.engine import clock
from octavo.engine.backend import Backend, check_quantizable, choose_backend
from octavo.engine.engine import Engine
from octavo.engine.face import Chat, open_face
from octavo.engine.grammar import GrammarCompiler
from octavo.engine.intake import Intake
from octavo.engine.kept import this_machine
from octavo.engine.lives import LifeRecorder
from octavo.engine.load import ModelFiles
from octavo.engine.machine import GIB, available_memory, give_back_memory
from octavo.engine.resolve import CacheSettings, resolve_cache
from octavo.engine.text import TokenBytes
from octavo.errors import SettingError
from octavo.executors.executor import Executor
from octavo.executors.pages import element_size
from octavo.models.registry import WeightReader, build_program
from octavo.weights.source import TensorSource
from octavo.weights.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """A running engine and what belongs to it. `reasons` says how open settings were resolved."""

    engine: Engine
    tokenizer: Tokenizer | None
    chat: Chat
    sampling_defaults: Mapping[str, Any]
    reasons: tuple[str, ...]


def start_engine(config: EngineConfig, *, encodes: bool = True) -> StartedEngine:
    """Load a model and start its engine in this process.

    encodes: False where prompts come as token ids, and hardly anything else as text.
    """
    face = open_face(config, encodes="soon" if encodes else "rarely")
    files = face.files
    program = build_program(files.config)
    weights = WeightReader(files.config, program, files.source)
    tokenizer = face.tokenizer
    backend = choose_backend(config, program)
    check_quantizable(config, program, weights)
    cache = resolve_cache(
        config,
        max_context=program.max_context,
        kv_groups=program.kv_groups,
        available=_free_beside(backend.weight_bytes(program, weights), available_memory()),
    )
    kv_element = element_size(cache.kv_cache_dtype, program.kv_groups[0].head_dim)
    prepared = backend.prepared(program, weights, kv_element)
    digest = _weights_digest(files.source)
    meanwhile = tokenizer.prepare if tokenizer is not None and encodes else lambda: None
    executor = backend.build(
        config, cache, program, weights,
        weights_digest=digest, clock=clock.monotonic, meanwhile=meanwhile,
    )  # fmt: skip
    files.source.close()
    give_back_memory()
    intake = Intake(
        tokenizer=tokenizer,
        vocab_size=program.vocab_size,
        max_model_len=cache.max_model_len,
        max_pool_tokens=cache.num_blocks * cache.block_size,
        seed=config.seed,
    )
    predictor = StepPredictor(prepared, this_machine())
    steering = [] if config.target_itl_ms is None else [_describe_target(config, predictor)]
    engine = Engine(
        executor=executor,
        scheduler=_scheduler(config, cache, executor.fingerprint, predictor),
        intake=intake,
        decoder=_decoder(tokenizer, program.vocab_size),
        clock=clock.monotonic,
        compiler=None if tokenizer is None else GrammarCompiler(tokenizer, program.vocab_size),
        predictor=predictor,
        lives=LifeRecorder(config.explain_max_requests),
    )
    return StartedEngine(
        engine=engine,
        tokenizer=tokenizer,
        chat=face.chat,
        sampling_defaults=face.sampling_defaults,
        reasons=(
            _describe(files, executor, backend),
            *executor.notes,
            *cache.reasons,
            *steering,
        ),
    )


def _scheduler(
    config: EngineConfig, cache: CacheSettings, fingerprint: str, cost: StepCost
) -> Scheduler:
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
        cost=cost,
        target_itl=None if config.target_itl_ms is None else config.target_itl_ms / 1e3,
    )


def _describe(files: ModelFiles, executor: Executor, backend: Backend) -> str:
    because = f", since {backend.reason}" if backend.reason else ""
    return f"{files.path.name} on the {executor.name} executor{because}"


def _describe_target(config: EngineConfig, predictor: StepPredictor) -> str:
    return (
        f"prompts leave {config.target_itl_ms:g} ms between tokens; predicted at first by limits "
        f"{predictor.machine.source}"
    )


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
