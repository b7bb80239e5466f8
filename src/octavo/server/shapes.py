"""OpenAI's shapes: pieces to chunks, and chunks joined to a whole reply.

Decides names and nesting of every reply. Knows neither HTTP nor the engine.

Invariant: a whole reply is made from the chunks that a stream would have sent, and from nothing
else.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.engine.outputs import PromptLogprobs
from octavo.request import Logprob, RequestMetrics
from octavo.server.pieces import Piece, ToolCallPart, Totals

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no infinity


class Shape(Protocol):
    """How one kind of reply looks."""

    def chunks(self, piece: Piece) -> Sequence[Json]:
        """Return the choices that a piece adds, each for one chunk."""
        ...

    def envelope(self, choices: Sequence[Json], *, is_whole: bool) -> Json:
        """Return a chunk or a whole reply around choices."""
        ...

    def join(self, choices: Sequence[Json]) -> Json:
        """Return one choice of a whole reply from its chunks'."""
        ...


# --- numbers ------------------------------------------------------------------------------------


def usage(totals: Totals) -> Json:
    """Return OpenAI's usage, with the prompt tokens found in the cache."""
    prompt, generated = totals.num_prompt_tokens, totals.num_generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": totals.num_cached_tokens},
    }


def timings(totals: Totals) -> Json:
    """Return where the time went, in milliseconds; the longest of several prompts counts."""
    queued = _longest(totals.metrics, "arrival_time", "first_scheduled_time")
    prompt = _longest(totals.metrics, "first_scheduled_time", "first_token_time")
    generation = _longest(totals.metrics, "first_token_time", "finished_time")
    later = totals.num_generated_tokens - len(totals.finish_reasons)
    return {
        "queued_ms": _milliseconds(queued),
        "prompt_ms": _milliseconds(prompt),
        "generation_ms": _milliseconds(generation),
        "tokens_per_second": round(later / generation, 2) if generation and later > 0 else None,
        "cached_tokens": totals.num_cached_tokens,
        "num_preemptions": sum(m.num_preemptions for m in totals.metrics),
    }


def _longest(metrics: Sequence[RequestMetrics], start: str, end: str) -> float | None:
    pairs = ((getattr(m, start), getattr(m, end)) for m in metrics)
    return max((b - a for a, b in pairs if a is not None and b is not None), default=None)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def prompt_logprobs_json(found: PromptLogprobs) -> list[Any]:
    """Return vLLM's list: per prompt token a dict of ids; the first has none."""
    return [
        None if entry is None else {str(token): _logprob_json(e) for token, e in entry.items()}
        for entry in found
    ]


def _logprob_json(entry: Logprob) -> Json:
    return {
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": entry.decoded_token,
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, MIN_LOGPROB)


# --- completions --------------------------------------------------------------------------------


@dataclass(slots=True)
class CompletionShape:
    """/v1/completions. echoes: per prompt what an answer begins with, or None.

    with_ids: tell token ids. is_echo_only: leave out what was generated. token_bytes: what a token
    adds to the text. positions: where each answer's text stands.
    """

    id: str
    model: str
    created: int
    echoes: Sequence["Echo | None"]
    prompt_token_ids: Sequence[list[int]]
    with_logprobs: bool = False
    with_ids: bool = False
    is_echo_only: bool = False
    token_bytes: Callable[[int], bytes] = lambda token: b""
    positions: dict[int, "TextPosition"] = field(default_factory=dict)

    def chunks(self, piece: Piece) -> Sequence[Json]:
        """See `Shape`."""
        echo = self.echoes[piece.prompt] if piece.is_first else None
        made = [] if echo is None else [self._echo_choice(piece, echo)]
        choice = self._choice(piece)
        if piece.is_first:
            (made[0] if made else choice).update(self._first_fields(piece))
        return [*made, choice]

    def _first_fields(self, piece: Piece) -> Json:
        echo = self.echoes[piece.prompt]
        fields: Json = {}
        if piece.prompt_logprobs is not None and not (echo and echo.tells_logprobs):
            fields["prompt_logprobs"] = prompt_logprobs_json(piece.prompt_logprobs)
        if self.with_ids:
            fields["prompt_token_ids"] = self.prompt_token_ids[piece.prompt]
        return fields

    def _choice(self, piece: Piece) -> Json:
        text, ids, logprobs = piece.parts.content, piece.token_ids, piece.logprobs
        if self.is_echo_only:
            text, ids, logprobs = "", [], []
        choice: Json = {
            "index": piece.choice,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._hides(piece) else piece.finish_reason,
            "stop_reason": None if self.is_echo_only else piece.stop_reason,
        }
        if self.with_logprobs:
            entries = list(zip(ids, logprobs or [], strict=False))
            choice["logprobs"] = self._legacy(piece.choice, entries)
        if self.with_ids:
            choice["token_ids"] = ids
        if piece.is_ending_forced:
            choice["is_ending_forced"] = True
        return choice

    def _hides(self, piece: Piece) -> bool:
        return self.is_echo_only and piece.finish_reason is not None

    def _echo_choice(self, piece: Piece, echo: "Echo") -> Json:
        choice: Json = {
            "index": piece.choice,
            "text": echo.text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self.with_logprobs and piece.prompt_logprobs is not None:
            entries = list(zip(echo.token_ids, piece.prompt_logprobs, strict=True))
            choice["logprobs"] = self._legacy(piece.choice, entries, echo.token_text)
        if self.with_ids:
            choice["token_ids"] = []
        return choice

    def _legacy(
        self,
        choice: int,
        entries: Sequence[tuple[int, Mapping[int, Logprob] | None]],
        token_text: Callable[[int], str] | None = None,
    ) -> Json:
        """Return OpenAI's old form; offsets are characters from the answer's beginning."""
        position = self.positions.setdefault(choice, TextPosition())
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in entries:
            own = None if entry is None else entry[token]
            text = own.decoded_token if own is not None else token_text and token_text(token)
            shown["tokens"].append(text or "")
            shown["token_logprobs"].append(None if own is None else finite(own.logprob))
            shown["top_logprobs"].append(None if entry is None else self._top(entry))
            shown["text_offset"].append(position.advance(self.token_bytes(token)))
        return shown

    def _top(self, entry: Mapping[int, Logprob]) -> Json:
        return {e.decoded_token or f"token_id:{t}": finite(e.logprob) for t, e in entry.items()}

    def envelope(self, choices: Sequence[Json], *, is_whole: bool) -> Json:
        """See `Shape`."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def join(self, choices: Sequence[Json]) -> Json:
        """See `Shape`."""
        whole = dict(choices[0])
        for choice in choices[1:]:
            _append(whole, choice, ("text", "token_ids"))
            _replace(whole, choice)
            if choice["logprobs"] is not None:
                if whole["logprobs"] is None:
                    whole["logprobs"] = choice["logprobs"]
                else:
                    _append(whole["logprobs"], choice["logprobs"], tuple(choice["logprobs"]))
        return whole


class TextPosition:
    """Counts an answer's characters, whose bytes may be split over tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def advance(self, content: bytes) -> int:
        """Return where the characters of a token's bytes begin, and step over them."""
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(content))
        return start


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with. tells_logprobs: it shows the
    prompt's log-probabilities, so that they need not be told besides."""

    text: str
    token_ids: list[int]
    token_text: Callable[[int], str]
    tells_logprobs: bool


def _append(whole: Json, added: Json, names: Sequence[str]) -> None:
    """Append strings and lists of `added` to those of `whole`, in new objects."""
    for name in names:
        if name in added:
            whole[name] = whole[name] + added[name] if name in whole else added[name]


def _replace(whole: Json, later: Json) -> None:
    """Take over what only the last chunk of an answer tells."""
    for name in ("finish_reason", "stop_reason", "is_ending_forced"):
        if name in later:
            whole[name] = later[name]


# --- chat ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class ChatShape:
    """/v1/chat/completions. token_bytes: the exact bytes of a token."""

    id: str
    model: str
    created: int
    with_logprobs: bool
    num_top: int
    with_ids: bool
    token_bytes: Callable[[int], bytes]

    def chunks(self, piece: Piece) -> Sequence[Json]:
        """See `Shape`."""
        delta: Json = {}
        if piece.is_first:
            delta = {"role": "assistant", "content": ""}
        if piece.parts.content:
            delta["content"] = piece.parts.content
        if piece.parts.reasoning:
            delta["reasoning_content"] = piece.parts.reasoning
        if piece.parts.tool_calls:
            delta["tool_calls"] = [_call_json(call) for call in piece.parts.tool_calls]
        choice: Json = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.with_logprobs:
            pairs = zip(piece.token_ids, piece.logprobs or [], strict=False)
            choice["logprobs"] = {"content": [self._entry(*pair) for pair in pairs]}
        if self.with_ids:
            choice["token_ids"] = piece.token_ids
        if piece.is_ending_forced:
            choice["is_ending_forced"] = True
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(piece.prompt_logprobs)
        return [choice]

    def _entry(self, token: int, found: Mapping[int, Logprob]) -> Json:
        ranked = sorted(found.items(), key=lambda pair: pair[1].rank or 0)
        tops = [self._token(*pair) for pair in ranked if (pair[1].rank or 0) <= self.num_top]
        return {**self._token(token, found[token]), "top_logprobs": tops[: self.num_top]}

    def _token(self, token: int, entry: Logprob) -> Json:
        return {
            "token": entry.decoded_token or "",
            "logprob": finite(entry.logprob),
            "bytes": list(self.token_bytes(token)),
        }

    def envelope(self, choices: Sequence[Json], *, is_whole: bool) -> Json:
        """See `Shape`."""
        return {
            "id": self.id,
            "object": "chat.completion" if is_whole else "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def join(self, choices: Sequence[Json]) -> Json:
        """See `Shape`."""
        whole = {name: value for name, value in choices[0].items() if name != "delta"}
        message: Json = {"role": "assistant", "content": "", "refusal": None}
        calls: dict[int, Json] = {}
        for number, choice in enumerate(choices):
            delta = choice["delta"]
            _append(message, delta, ("content", "reasoning_content"))
            for call in delta.get("tool_calls", ()):
                _merge_call(calls, call)
            if number:
                _append(whole, choice, ("token_ids",))
                _replace(whole, choice)
                if choice["logprobs"] is not None:
                    whole["logprobs"] = {
                        "content": whole["logprobs"]["content"] + choice["logprobs"]["content"]
                    }
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
            message["content"] = message["content"] or None
        return {**whole, "message": message}


def _call_json(call: ToolCallPart) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _merge_call(calls: dict[int, Json], added: Json) -> None:
    known = calls.get(added["index"])
    if known is None:
        calls[added["index"]] = {
            "id": added["id"],
            "type": "function",
            "function": dict(added["function"]),
        }
    else:
        known["function"]["arguments"] += added["function"]["arguments"]
