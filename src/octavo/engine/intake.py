"""From what a caller gives to a `Request` that the engine is certain to be able to run.

Decides which ids, lengths and parameters the model allows, and resolves what the caller left open:
the number of tokens to generate, the seed, which tokens end a sequence. Knows neither blocks nor
the order of work.

Invariant: every token id in a `Request` is inside the vocabulary, and its longest sequence is
inside the context.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

from octavo.errors import BadRequestError, ContextLengthError, InvalidParameterError
from octavo.request import Pooling, Request, SamplingParams, is_text

_LOW, _HIGH = -(2**31), 2**31 - 1  # priorities


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are: no BOS is added. `prompt` is shown in outputs."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt` keeps its blocks apart from those of other salts."""

    prompt: str
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt


class TextEncoder(Protocol):
    """What intake needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Builds requests for one model.

    vocab_size: ids from 0 to vocab_size - 1 exist. max_model_len: most tokens of prompt and answer.
    max_pool_tokens: most tokens that the cache holds, which ends an answer of no given length.
    seed: requests without a seed derive theirs from it and their number.
    """

    tokenizer: TextEncoder | None
    vocab_size: int
    max_model_len: int
    max_pool_tokens: int
    seed: int

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        number: int,
        arrival_time: float = 0.0,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> Request:
        """Return the validated request; raises a `BadRequestError` that names field and limit.

        number: how many requests came before; the seed of a request without one follows from it.
        """
        ids = self._truncate(self.token_ids(prompt), params)
        self._check_ids("prompt_token_ids", ids)
        self._check_params(params)
        seed = params.seed if params.seed is not None else _derived_seed(self.seed, number)
        is_integer = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_integer or not _LOW <= priority <= _HIGH:
            raise InvalidParameterError("priority", priority, f"an integer from {_LOW} to {_HIGH}")
        return Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            max_tokens=self._max_tokens(ids, params) if pooling is None else self._one(ids),
            seed=seed,
            stop_ids=self._stop_ids(params),
            bad_word_ids=tuple(self._spellings(params.bad_words or ())),
            arrival_time=arrival_time,
            priority=priority,
            extra_keys=_extra_keys(prompt),
            pooling=pooling,
        )

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's ids, with one BOS before a text if the model has one."""
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids: Any = prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
            if not isinstance(ids, (list, tuple)):
                raise InvalidParameterError("prompt_token_ids", ids, "a list of token ids")
            return list(ids)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(text, str):
            raise InvalidParameterError(
                "prompt", prompt, "a text, or a mapping with prompt or prompt_token_ids"
            )
        return self._require_tokenizer().encode(text)

    def _require_tokenizer(self) -> TextEncoder:
        if self.tokenizer is None:
            raise BadRequestError("This model came without a tokenizer: give prompt_token_ids.")
        return self.tokenizer

    @staticmethod
    def _truncate(ids: list[int], params: SamplingParams) -> list[int]:
        limit = params.truncate_prompt_tokens
        return ids if limit is None else ids[-limit:]

    def _check_ids(self, field: str, ids: Collection[Any]) -> None:
        # Prompts are long and nearly always sound: a glance at all of them first.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        allowed = f"a token id from 0 to {self.vocab_size - 1}"
        empty = True
        for token_id in ids:
            empty = False
            is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < self.vocab_size:
                raise InvalidParameterError(field, token_id, allowed)
        if empty and field == "prompt_token_ids":
            raise BadRequestError(
                "The prompt is empty and the model has no token that begins a text. "
                "Give a prompt with at least one token."
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if params.stop:
            self._require_tokenizer()

    def _one(self, ids: list[int]) -> int:
        """Return 1 for a prompt whose state is wanted: it may fill the context."""
        if len(ids) > self.max_model_len:
            raise ContextLengthError(
                f"The input has {len(ids):,} tokens but the model holds {self.max_model_len:,}. "
                "Shorten it, or set truncate_prompt_tokens.",
                num_prompt_tokens=len(ids),
                limit=self.max_model_len,
            )
        return 1

    def _max_tokens(self, ids: list[int], params: SamplingParams) -> int:
        """Return how many tokens to generate: as asked, or as many as the context has left."""
        limit, num_prompt = self.max_model_len, len(ids)
        room = limit - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {num_prompt:,} tokens but the model holds {limit:,}, with at "
                "least one to generate. Shorten it, set truncate_prompt_tokens, or start octavo "
                "with a larger --max-model-len.",
                num_prompt_tokens=num_prompt,
                limit=limit,
            )
        if params.max_tokens is None:
            # The last token of an answer is never computed, so it takes no place in the pool.
            return max(1, min(room, self.max_pool_tokens + 1 - num_prompt))
        if params.max_tokens > room:
            raise ContextLengthError(
                f"The prompt has {num_prompt:,} tokens and max_tokens is {params.max_tokens:,}, "
                f"together {num_prompt + params.max_tokens:,}, but the model holds {limit:,}. "
                f"Lower max_tokens to {room:,} or less, set it to None for as many as fit, or "
                "start octavo with a larger --max-model-len.",
                num_prompt_tokens=num_prompt,
                max_tokens=params.max_tokens,
                limit=limit,
            )
        return params.max_tokens

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        asked = frozenset(params.stop_token_ids or ())
        if params.ignore_eos or self.tokenizer is None:
            return asked
        return asked.union(self.tokenizer.eos_ids)

    def _spellings(self, words: Iterable[str]) -> Iterable[tuple[int, ...]]:
        """Yield each bad word's ids, as it is spelled at the start of a text and after a space."""
        seen = set()
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._require_tokenizer().encode(text, add_bos=False))
                if ids and ids not in seen:
                    seen.add(ids)
                    yield ids


def _extra_keys(prompt: Prompt) -> tuple[str, ...]:
    salt: Any = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is None:
        return ()
    if not is_text(salt):
        raise InvalidParameterError("cache_salt", salt, "a text of valid Unicode")
    return (salt,)


def _derived_seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a model's generation_config sets, by vLLM's names.

    `do_sample: false` (Hugging Face's default where nothing is said of sampling) leaves vLLM's
    defaults, as vLLM does. Values of the wrong type are left out: a file cannot break requests.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {n: generation_config[n] for n in names if generation_config.get(n) is not None}
    usable = {}
    for name, value in values.items():
        try:
            SamplingParams(**{name: value})
        except InvalidParameterError:
            continue
        usable[name] = value
    return usable
