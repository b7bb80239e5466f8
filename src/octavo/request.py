"""What one caller asked, and the growing token lists that answer it.

Decides what valid `SamplingParams` are and when a sequence is finished by its tokens. Knows nothing
of text, blocks in memory or the order of work. Names and defaults follow vLLM's `SamplingParams`
and `RequestOutput`, so that its users change one import.

Invariant: `0 <= num_computed <= len(token_ids)`, and the cache holds exactly the first
`num_computed` tokens of a running sequence.
"""

import enum
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from octavo.errors import BadRequestError, InvalidParameterError, nearest

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
_INT64 = 2**63
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


class FinishReason(enum.StrEnum):
    """Why a sequence ended: OpenAI's words, and two that only an engine can say."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(enum.StrEnum):
    """Where a sequence stands; only the scheduler changes it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the output must be, in one of five ways: exactly one of the first five is given.

    json: a JSON schema, as a mapping or as its text. json_object: any JSON object. regex: a regular
    expression that the whole output matches. choice: one of these texts. grammar: a context-free
    grammar in Lark or GBNF form. disable_any_whitespace: JSON in its most compact form; without it,
    at most two blanks or newlines stand between two tokens of JSON.
    Names are those of vLLM's StructuredOutputsParams. Raises InvalidParameterError.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Ordered[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            allowed = f"exactly one of {', '.join(CONSTRAINTS)}"
            raise InvalidParameterError("structured_outputs", found, allowed)
        if self.json is not None and not isinstance(self.json, (dict, str)):
            raise InvalidParameterError("json", self.json, "a JSON schema or its text")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not is_text(value):
                raise InvalidParameterError(name, value, "a text of valid Unicode")
        _check_texts("choice", self.choice, "a list of texts, none of them empty")
        if self.choice is not None and not self.choice:
            raise InvalidParameterError("choice", [], "a list with at least one text")
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise InvalidParameterError(name, getattr(self, name), "true or false")

    @property
    def kind(self) -> str:
        """The name of the constraint that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The part of an output before the answer: `start`, free text, `end`.

    is_open: the prompt ends within it already, so the output has no `start`. Without it, an output
    that does not begin with `start` has no such part. Stop strings and structured outputs concern
    only what follows `end`.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends.

    A value out of range raises `InvalidParameterError`.

    n: sequences per prompt, 1 to 1024.
    temperature: 0 is greedy; logits are divided by it.
    top_k, top_p, min_p: keep the k likeliest (0 or -1: all), the smallest set whose probability
        reaches top_p, and those at least min_p times as likely as the likeliest.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for generated tokens
        (-2 to 2).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and
        output.
    seed: same seed and request, same tokens, whatever else runs. None: derived from the engine's.
    stop, stop_token_ids: end the sequence. include_stop_str_in_output: keep the stop string.
    ignore_eos: go on past the model's own end tokens, but not past `stop_token_ids`.
    max_tokens: generated tokens per sequence; None is as many as the context holds.
    min_tokens: no end token and no stop string counts before so many generated tokens.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report per position beside the
        actual one (0 to 20; -1 is the whole vocabulary). None reports nothing.
    logit_bias: token id to a number added to its logit (-100 to 100).
    allowed_token_ids: sample from these alone. bad_words: texts that must not be generated.
    detokenize: whether outputs have text; without it, no stop strings.
    skip_special_tokens: leave special tokens out of the text.
    truncate_prompt_tokens: keep only so many of the prompt's last tokens.
    structured_outputs: what the output must be: JSON of a schema, a regular expression...
    reasoning: how the output sets its reasoning apart from the answer; None is all answer.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Ordered[str] | None = None
    stop_token_ids: Ordered[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Ordered[int] | None = None
    bad_words: Ordered[str] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_lists(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from field names; an unknown one is an error that names the closest."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise BadRequestError(
                    f"There is no sampling parameter {name!r}.{nearest(name, known)}"
                )
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens before: penalties, bad words."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
        )


def _number(params: SamplingParams, name: str, low: float, high: float, allowed: str) -> None:
    value = getattr(params, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is in no range
        raise InvalidParameterError(name, value, allowed)


def _integer(
    params: SamplingParams, name: str, low: int, high: int, allowed: str, *, optional: bool = False
) -> None:
    value = getattr(params, name)
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParameterError(name, value, allowed)


def _check_ranges(p: SamplingParams) -> None:
    _integer(p, "n", 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")
    _number(p, "presence_penalty", -2, 2, "a number from -2 to 2")
    _number(p, "frequency_penalty", -2, 2, "a number from -2 to 2")
    _number(p, "repetition_penalty", 1e-6, 1e6, "a number from 0.000001 to 1000000")
    _number(p, "temperature", 0, 1e6, "a number from 0 to 1000000")
    _number(p, "top_p", 1e-300, 1, "a number above 0 and at most 1")
    _number(p, "min_p", 0, 1, "a number from 0 to 1")
    _integer(p, "top_k", -1, _INT64 - 1, "an integer of at least 1, or 0 or -1 for all")
    _integer(p, "seed", -_INT64, _INT64 - 1, "an integer of 64 bits", optional=True)
    _integer(p, "max_tokens", 1, _INT64 - 1, "an integer of at least 1", optional=True)
    _integer(p, "min_tokens", 0, _INT64 - 1, "an integer of at least 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidParameterError(
            "min_tokens", p.min_tokens, f"at most max_tokens, which is {p.max_tokens}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        _integer(
            p, name, -1, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or -1", optional=True
        )
    _integer(p, "truncate_prompt_tokens", 1, _INT64 - 1, "an integer of at least 1", optional=True)
    for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(p, name), bool):
            raise InvalidParameterError(name, getattr(p, name), "true or false")


def _check_lists(p: SamplingParams) -> None:
    stop = [p.stop] if isinstance(p.stop, str) else p.stop
    _check_texts("stop", stop, "a text or a list of texts, none of them empty")
    _check_texts("bad_words", p.bad_words, "a list of texts, none of them empty")
    if stop is not None and len(stop) > MAX_STOP_STRINGS:
        raise InvalidParameterError("stop", len(stop), f"at most {MAX_STOP_STRINGS} texts")
    if p.stop and not p.detokenize:
        raise InvalidParameterError("detokenize", False, "true where stop strings are given")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(p, name)
        if ids is not None and not (isinstance(ids, (list, tuple)) and all(map(_is_id, ids))):
            raise InvalidParameterError(name, ids, "a list of token ids from 0 up")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise InvalidParameterError("allowed_token_ids", [], "a list with at least one token id")
    _check_bias(p.logit_bias)
    for name, kind in (("structured_outputs", StructuredOutputs), ("reasoning", Reasoning)):
        if not isinstance(getattr(p, name), kind | None):
            raise InvalidParameterError(name, getattr(p, name), f"a {kind.__name__} or None")


def _check_texts(name: str, texts: object, allowed: str) -> None:
    if texts is None:
        return
    # A bare string would pass for a list of its letters, so only these two will do.
    if not isinstance(texts, (list, tuple)) or not all(is_text(t) and t for t in texts):
        raise InvalidParameterError(name, texts, allowed)


def is_text(value: object) -> bool:
    """Whether something is a text without lone surrogates, which no encoding has."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # a text may be megabytes: no loop over its letters
    except UnicodeEncodeError:
        return False
    return True


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict) or not all(map(_is_id, bias)):
        raise InvalidParameterError(
            "logit_bias", bias, "a mapping from token ids (from 0 up) to numbers"
        )
    for token_id, value in bias.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not -100 <= value <= 100:
            raise InvalidParameterError(
                f"logit_bias[{token_id}]", value, "a number from -100 to 100"
            )


Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One validated prompt on its way through the engine; nothing in it changes.

    max_tokens: generated tokens per sequence, resolved against the context length.
    stop_ids: every token id that ends a sequence; banned before `params.min_tokens`.
    bad_word_ids: `params.bad_words` as token ids, one tuple per spelling.
    seed: never None here. priority: lower runs earlier. extra_keys: what beside the tokens must
    be equal for blocks to be shared (cache salt, adapter version). pooling: how the final states
    of the prompt become one, if that is wanted; then one token is drawn for nobody.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    extra_keys: tuple[str, ...] = ()
    pooling: Pooling | None = None

    @property
    def max_length(self) -> int:
        """Most tokens that one of its sequences can have, prompt included."""
        return len(self.prompt_token_ids) + self.max_tokens


class Sequence:
    """One growing list of tokens. The scheduler owns it; others read.

    max_length: most tokens that it can have. capacity: token slots that it may write without
    asking the block manager again.
    order: its place among all sequences; smaller runs first and is preempted last.
    num_samples: tokens to draw when its last token is computed: n until the first, then 1.
    is_protected: it has yielded often enough, and will not again.
    num_cached_tokens: prompt tokens found in the cache when it first started; None before.
    num_lost: tokens that were computed when it was last preempted.
    num_openings_seen: state of the scheduler at which it last tried to start; None before.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "capacity",
        "finish_reason",
        "index",
        "is_protected",
        "max_length",
        "num_cached_tokens",
        "num_computed",
        "num_lost",
        "num_openings_seen",
        "num_passed",
        "num_preemptions",
        "num_reserved",
        "num_samples",
        "order",
        "request",
        "status",
        "stop_token",
        "token_ids",
        "why_waiting",
    )

    def __init__(self, request: Request, index: int, order: tuple[int, int, int]) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.token_ids = list(request.prompt_token_ids)
        self.max_length = request.max_length
        self.num_computed = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.capacity = 0
        self.num_reserved = 0
        self.status = SequenceStatus.WAITING
        self.why_waiting = "new"
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_samples = request.params.n
        self.num_preemptions = 0
        self.num_lost = 0
        self.num_openings_seen: int | None = None
        self.num_passed = 0
        self.is_protected = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the caller gave."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a copy."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    def append(self, token_id: int) -> FinishReason | None:
        """Add one generated token; return and keep why the sequence ends with it, if it does."""
        tokens, request = self.token_ids, self.request
        tokens.append(token_id)
        if token_id in request.stop_ids and self.num_output_tokens >= request.params.min_tokens:
            self.stop_token = token_id
            self.finish_reason = FinishReason.STOP
        elif len(tokens) >= self.max_length:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index}, {self.status.value}, "
            f"{self.num_computed} of {len(self.token_ids)} tokens computed)"
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token under the unmodified distribution; rank from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` answers. `logprobs` has one dict per generated token.

    stop_reason: the stop string or stop token id that ended it; None for the model's end token.
    is_ending_forced: a structured output was near its limit of tokens, and a short ending that
    makes it valid was chosen for it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_ending_forced: bool = False

    def finished(self) -> bool:
        """Whether nothing will be added any more."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """Everything generated for one prompt so far. `error` is set if the request failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: Exception | None = field(default=None, repr=False)
