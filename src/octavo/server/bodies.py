"""What requests may hold: the models behind validation and the OpenAPI page.

Decides names, types and defaults of fields, and how they become `SamplingParams`. Ranges are
checked by `SamplingParams` and the engine's intake, once. Knows neither replies nor the engine.

Invariant: a field that is not declared here is reported as ignored, never half-applied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.request import SamplingParams, StructuredOutputs

# Of a list the first wrong entry is told: each that is costs more than parsing the whole body did.
Ids = Annotated[list[int], Field(fail_fast=True)]
Words = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MAX_INPUTS = 2048  # as OpenAI allows


def _first_wrong(given: Any) -> Any:
    """Return a mapping, or one of its entries that is no number alone."""
    if isinstance(given, dict):
        for name, value in given.items():
            if type(value) not in (int, float):
                return {name: value}
    return given


Biases = Annotated[dict[str, Annotated[float, Strict()]], BeforeValidator(_first_wrong)]


class Body(BaseModel):
    """Base of bodies: unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that nothing here reads, nested ones with dots."""
        return list(_unknown(self))


def _unknown(model: BaseModel, prefix: str = "") -> Iterator[str]:
    yield from (prefix + name for name in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _unknown(value, f"{prefix}{name}.")


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = Field(False, description="A last chunk with the usage.")
    continuous_usage_stats: bool = Field(False, description="Usage so far in every chunk.")


class SamplingFields(Body):
    """Fields that completions and chat share."""

    model: str | None = Field(None, description="By default the served model.")
    n: int = Field(1, description="Answers per prompt.")
    stream: bool | None = Field(False, description="Send the answer in pieces, as events.")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="Draw from so many of the likeliest; 0 is all.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, description="Same seed and request, same tokens.")
    stop: str | Words | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: Biases | None = Field(None, description="Token id to -100 … 100.")
    allowed_token_ids: Ids | None = None
    bad_words: Words | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only so many of the prompt's last tokens."
    )
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = Field(False, description="Tell the ids beside the text.")
    return_progress: bool | None = Field(
        False, description="Stream how much of the prompt is computed."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar."
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="Older name.")
    guided_regex: str | None = Field(None, description="Older name.")
    guided_choice: Words | None = Field(None, description="Older name.")
    guided_grammar: str | None = Field(None, description="Older name.")
    priority: int = Field(0, description="Lower is earlier, with --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Share blocks only with the same salt.")
    timeout: float | None = Field(None, description="Deadline in seconds.", gt=0)
    user: str | None = Field(None, description="Has no effect.")

    def sampling_params(self, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
        """Return the parameters: what was given, over the model's defaults, over OpenAI's."""
        given = {
            name: value for name in _SAMPLED if (value := getattr(self, name, None)) is not None
        }
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        if (constraint := self.constraint()) is not None:
            given["structured_outputs"] = constraint
        return SamplingParams.from_dict({**defaults, **given, **fixed})

    def constraint(self) -> StructuredOutputs | None:
        """Return what the output must be, by vLLM's names for it."""
        given = dict(self.structured_outputs or {})
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                given[name] = value
        known = {field.name for field in fields(StructuredOutputs)}
        for name in given:
            if name not in known:
                raise InvalidParameterError(
                    "structured_outputs", name, f"one of {', '.join(sorted(known))}"
                )
        return StructuredOutputs(**given) if given else None

    @property
    def wants_stream(self) -> bool:
        """Whether the reply is a stream of events."""
        return bool(self.stream)

    def check_stream_options(self) -> None:
        """Raise where options of a stream are given without one, as OpenAI does."""
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options", "given", "null without stream: true")


_SAMPLED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not name.strip().lstrip("-").isdecimal() or len(name) > 20:
            raise InvalidParameterError(
                "logit_bias", name, "a mapping from token ids (from 0 up) to numbers"
            )
        bias[int(name)] = value
    return bias


Prompts = str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)]


def listed(given: Prompts, field: str) -> list[str | list[int]]:
    """Return the texts or lists of ids that were given, of which there must be at least one."""
    is_single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Any] = [given] if is_single else list(given)
    if not prompts:
        raise BadRequestError(f"{field} is empty. Give a text or at least one token id.")
    return prompts


class CompletionBody(SamplingFields):
    """A request to /v1/completions."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    echo: bool | None = Field(False, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(None, description="Likeliest tokens to tell per position.")
    suffix: str | None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="Only equal to n.")

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
        """Return each prompt; raises where there are none or too many."""
        prompts = listed(self.prompt, "prompt")
        if len(prompts) > max_prompts:
            raise InvalidParameterError("prompt", len(prompts), f"at most {max_prompts} prompts")
        return prompts

    def check(self) -> None:
        """Raise for what this server does not do."""
        self.check_stream_options()
        if self.suffix:
            raise BadRequestError("suffix is not supported. Put all of the text into prompt.")
        if self.best_of not in (None, self.n):
            raise InvalidParameterError("best_of", self.best_of, f"n, which is {self.n}")

    def completion_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; `max_tokens` 0 with echo draws one token for nobody."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if self.is_echo_only:
            max_tokens = 1
        fixed: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            fixed["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **fixed)

    @property
    def is_echo_only(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return bool(self.echo) and self.max_tokens == 0


class ChatBody(SamplingFields):
    """A request to /v1/chat/completions."""

    messages: Objects = Field(description="The conversation, oldest first.", min_length=1)
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens.")
    logprobs: bool | None = Field(False, description="Tell each token's log-probability.")
    top_logprobs: int | None = Field(None, description="Likeliest tokens to tell, 0 to 20.")
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="Passed to the chat template.")
    chat_template: str | None = Field(None, description="Jinja template to use instead.")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def chat_params(self, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
        """Return the sampling parameters; the answer may fill the context by default."""
        self.check_stream_options()
        limit = self.max_completion_tokens
        top = self.top_logprobs
        if top is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs", top, "null without logprobs: true")
        if top is not None and not 0 <= top <= 20:
            raise InvalidParameterError("top_logprobs", top, "an integer from 0 to 20")
        return self.sampling_params(
            defaults,
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(top or 0) if self.logprobs else None,
            **fixed,
        )


class EmbeddingBody(Body):
    """A request to /v1/embeddings."""

    model: str | None = Field(None, description="By default the served model.")
    input: Prompts = Field(description="A text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or little-endian float32 as base64."
    )
    dimensions: int | None = Field(
        None, description="Keep so many of the first numbers, normalised again."
    )
    normalize: bool = Field(True, description="Scale each vector to length 1.")
    pooling: Literal["mean", "last"] | None = Field(
        None, description="Of the states of a text's tokens; by default as the server was started."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only so many of each input's last tokens."
    )
    priority: int = Field(0, description="Lower is earlier, with --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Share blocks only with the same salt.")
    timeout: float | None = Field(None, description="Deadline in seconds.", gt=0)
    user: str | None = Field(None, description="Has no effect.")

    def inputs(self) -> list[str | list[int]]:
        """Return each input; raises where there are none or too many."""
        found = listed(self.input, "input")
        if len(found) > MAX_INPUTS:
            raise InvalidParameterError("input", len(found), f"at most {MAX_INPUTS} inputs")
        return found


class TokenizeBody(Body):
    """A request to /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(None, min_length=1)
    add_special_tokens: bool = Field(True, description="Begin a prompt with BOS.")
    return_token_strs: bool | None = Field(False, description="Tell each token's text.")
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Ids


class TemplateBody(Body):
    """A request to /apply-template."""

    model: str | None = None
    messages: Objects = Field(min_length=1)
    tools: Objects | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def template_options(
    body: ChatBody | TokenizeBody | TemplateBody, *, trusts_templates: bool
) -> dict[str, Any]:
    """Return what goes to the chat template beside the messages.

    A template is code: one from a request is refused unless the server `trusts_templates`.
    """
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in _NO_VARIABLES:
            raise InvalidParameterError("chat_template_kwargs", name, "other names than that")
    if getattr(body, "reasoning_effort", None) is not None:
        options["reasoning_effort"] = body.reasoning_effort  # type: ignore[union-attr]
    if body.chat_template is not None and not trusts_templates:
        raise BadRequestError(
            "chat_template in a request is refused: start octavo with "
            "--trust-request-chat-template, or give it one with --chat-template."
        )
    for name in ("add_generation_prompt", "chat_template", "documents"):
        if (value := getattr(body, name, None)) is not None:
            options[name] = value
    if body.continue_final_message:
        options["continue_final_message"] = True
    return options


# Arguments of the functions that render and encode, which are not for callers to set.
_NO_VARIABLES = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "allow_special",
        "now",
    )
)
