"""`octavo generate`, `chat` and `run`: a stream of text on stdout, figures on stderr.

Decides how an answer looks on a terminal. Invariant: stdout carries the model's text and nothing
else, so it can be piped.
"""

import secrets
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.engine.intake import Prompt
from octavo.engine.outputs import OutputDelta
from octavo.errors import BadRequestError, ChatTemplateError
from octavo.llm import LLM
from octavo.request import RequestMetrics, SamplingParams


def read_prompt() -> str:
    """Return standard input without the line break that `echo` and editors end it with."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _not_text(error) from None


def run_generate(
    model: str,
    prompt: str,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    raw: bool,
    system: str | None,
) -> None:
    """Answer `prompt`: as a chat turn if the model has a template, else as a text to continue."""
    _check(sampling)
    with LLM(model, **engine) as llm:
        _print_start(llm)
        params = _params(llm, sampling)
        if raw or (not llm.has_chat_template and system is None):
            source: Prompt = prompt
        else:
            source = llm.chat_prompt(_messages(system, prompt))
        answer = Answer(llm.stream(source, params))
        for text in answer:
            print(text, end="", flush=True)
        print()
        answer.print_figures()


def run_chat(
    model: str, *, engine: dict[str, Any], sampling: dict[str, Any], system: str | None
) -> None:
    """Read turns from standard input until it ends, and stream each answer."""
    _check(sampling)
    with LLM(model, **engine) as llm:
        _print_start(llm)
        if not llm.has_chat_template:
            raise ChatTemplateError(
                f"{model} has no chat template, so it cannot chat. Use `octavo generate --raw`, or "
                "give one with --chat-template."
            )
        params = _params(llm, sampling)
        beginning = _messages(system)
        messages = list(beginning)
        for line in _turns():
            if line == "/clear":
                messages = list(beginning)
                continue
            question = {"role": "user", "content": line}
            try:
                answer = _say(llm, [*messages, question], params)
            except BadRequestError as error:
                if not _is_interactive():
                    raise
                # This turn cannot be answered; the conversation before it still stands.
                print(f"octavo: {error}", file=sys.stderr)
                continue
            messages += [question, {"role": "assistant", "content": answer}]


def _say(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream the answer to `messages` and return it; ^C ends it, not the conversation."""
    answer = Answer(llm.stream(llm.chat_prompt(messages), params))
    try:
        for text in answer:
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()
    print()
    answer.print_figures()
    return answer.text


class Answer:
    """The text of one streamed answer, and its figures."""

    def __init__(self, deltas: Iterator[OutputDelta]) -> None:
        self.text = ""
        self._deltas = deltas
        self._num_tokens = 0
        self._last: OutputDelta | None = None

    def __iter__(self) -> Iterator[str]:
        for delta in self._deltas:
            if delta.error is not None:
                raise delta.error
            self._last = delta
            self._num_tokens += len(delta.token_ids)
            self.text += delta.text
            if delta.text:
                yield delta.text

    def close(self) -> None:
        """Stop generating."""
        self._deltas.close()  # type: ignore[attr-defined]

    def print_figures(self) -> None:
        """Print tokens, time to first token and speed on stderr."""
        if self._last is None or self._last.metrics is None:
            return
        parts = [f"{self._last.num_prompt_tokens:,} prompt tokens"]
        if self._last.num_cached_tokens:
            parts[0] += f" ({self._last.num_cached_tokens:,} cached)"
        parts.append(f"{self._num_tokens:,} generated")
        parts += _times(self._last.metrics, self._num_tokens)
        if self._last.finish_reason == "length":
            parts.append("cut at the length limit")
        print(f"[{' · '.join(parts)}]", file=sys.stderr)


def _times(metrics: RequestMetrics, num_tokens: int) -> Iterable[str]:
    first, end = metrics.first_token_time, metrics.finished_time
    if first is None:
        return
    yield f"first token after {1000 * (first - metrics.arrival_time):,.0f} ms"
    if end is not None and num_tokens > 1 and end > first:
        yield f"{(num_tokens - 1) / (end - first):.1f} tokens/s"


def _check(sampling: dict[str, Any]) -> None:
    """Raise for impossible parameters before a model is loaded for them."""
    SamplingParams.from_dict({"max_tokens": None, **sampling})


def _params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """Return what was asked for over the model's defaults over greedy, to the end of the answer."""
    values = {"temperature": 0.0, "max_tokens": None, **llm.sampling_defaults, **given}
    values.setdefault("seed", secrets.randbits(63))
    return SamplingParams.from_dict(values)


def _messages(system: str | None, *user: str) -> list[dict[str, Any]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": "user", "content": text} for text in user]


def _turns() -> Iterator[str]:
    """Yield what the user types, until an empty line, /exit, or the end of the input."""
    prompt = "> " if _is_interactive() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise _not_text(error) from None
        if line in ("", "/exit", "/quit"):
            return
        yield line


def _not_text(error: UnicodeDecodeError) -> BadRequestError:
    return BadRequestError(f"Standard input is not UTF-8 text: {error}.")


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _print_start(llm: LLM) -> None:
    for reason in llm.reasons:
        print(f"[{reason}]", file=sys.stderr)
