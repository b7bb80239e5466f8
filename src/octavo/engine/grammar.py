"""From a `StructuredOutputs` to a compiled grammar, off the engine's loop.

Decides how each kind of constraint is written for the grammar compiler (llguidance), which limits
hold while it compiles, and what of it is kept for the next request. Knows no sequences.

Invariant: a grammar comes out whole or a `BadRequestError` says why not; nothing of a constraint
is left out in silence.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from octavo.engine import clock
from octavo.engine.matching import (
    MAX_ENDING,
    GrammarVocabulary,
    Thinking,
    deep_threads,
    find_ending,
    next_mask,
)
from octavo.engine.schema import (
    MAX_SCHEMA_CHARS,
    checked_schema,
    parsed_schema,
    patterns,
    subschemas,
)
from octavo.errors import BadRequestError, OctavoError
from octavo.request import Reasoning, StructuredOutputs
from octavo.weights.tokenizer import Tokenizer

Json = dict[str, Any]

# Schemas aside. For an expression of n parts, each of which may be left out, it takes a time that
# grows with n * n, and no limit of the compiler's own ends that: the 8,190 that fit take 6 s of a
# Zen 5 core and 1.4 GB, the most of 30 kinds of grammar that were tried. So long may a thread go on
# with a compilation that was given up.
MAX_GRAMMAR_CHARS = 1 << 14
MAX_CHOICES = 10_000
# An & joins expressions that hold at once: with 24 the compiler's own limits end it within 0.1 s,
# with 49 it had no end after 15 s. Those in texts count too: where a text ends the compiler says.
MAX_AMPERSANDS = 16
COMPILE_SECONDS = 10.0
_NUM_KEPT = 64  # compiled grammars
_NUM_THREADS = 2
_USUAL_MARGIN = 8
_LEAST_MARGIN = 2  # a character may begin that takes several tokens
_MAX_PARTS = 64
# Between two tokens of JSON. Unbounded, a model may write blanks until its tokens are used up.
WHITESPACE = r"[\x20\x0A]{0,2}"
_BLANK = r"/[ \n]{0,4}/"
_INLINE_JSON = re.compile(r"%json\s*")
_DRAWN = re.compile(r"\d+ \|")
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, from which every sequence's matcher is copied.

    ending: a short valid output, or None if none of at most `MAX_ENDING` tokens was found. margin:
    by how many tokens one more token may put off the end, as when it begins another object.
    """

    vocabulary: GrammarVocabulary
    prototype: llguidance.LLMatcher
    ending: tuple[int, ...] | None
    margin: int
    reasoning: Reasoning | None


class GrammarCompiler:
    """Compiles in threads of its own and keeps what it compiled last. `compile` may be called from
    one thread only."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()

    def compile(self, spec: StructuredOutputs, reasoning: Reasoning | None) -> Future[Grammar]:
        """Return the grammar to come; it fails with a `BadRequestError`."""
        key = _key(spec, reasoning)
        future = self._kept.get(key)
        if future is None or (future.done() and future.exception() is not None):
            deadline = clock.monotonic() + COMPILE_SECONDS
            future = self._threads.submit(self._compile_by, deadline, spec, reasoning)
            self._kept[key] = future
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return future

    def close(self) -> None:
        """Start nothing any more."""
        if "_threads" in self.__dict__:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return deep_threads(_NUM_THREADS, "octavo-grammar")

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """The tokenizer as the compiler takes it; made at first use, which takes a moment."""
        return GrammarVocabulary(self._tokenizer, self._vocab_size)

    def _compile_by(
        self, deadline: float, spec: StructuredOutputs, reasoning: Reasoning | None
    ) -> Grammar:
        """Compile, unless whoever asked has given up: nothing ends a compilation that has begun."""
        if clock.monotonic() >= deadline:
            raise compiled_too_late()
        return self._compile(spec, reasoning)

    def _compile(self, spec: StructuredOutputs, reasoning: Reasoning | None) -> Grammar:
        source = grammar_source(spec, reasoning, self.vocabulary.special)
        matcher = _matcher(self.vocabulary.tokenizer, source)
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        # Some limits are met only by the first mask, and so is a grammar that matches nothing.
        mask = next_mask(matcher, self.vocabulary)
        if matcher.is_error() or (mask is None and not matcher.is_accepting()):
            raise _refused(spec, matcher.get_error() or "no text matches it")
        thinking = Thinking(reasoning, self.vocabulary)
        ending = find_ending(matcher, self.vocabulary, thinking, MAX_ENDING)
        margin = self._margin(spec, len(ending or ()))
        return Grammar(self.vocabulary, matcher, ending, margin, reasoning)

    def _margin(self, spec: StructuredOutputs, num_ending: int) -> int:
        """Return the tokens that the largest part of an output needs at least.

        The parts of a small schema are measured one by one; one whose references lead out of it is
        not. Else the whole stands for its parts; a choice or an expression has none.
        """
        if spec.choice is not None or spec.regex is not None:
            return _LEAST_MARGIN
        largest = num_ending + _USUAL_MARGIN
        if spec.json is None:
            return largest
        parts = list(islice(_parts(checked_schema(parsed_schema(spec.json))), _MAX_PARTS + 1))
        if len(parts) > _MAX_PARTS:
            return largest
        endings = (self._ending_of(_with_options(part, spec)) for _, part in parts[:-1])
        return max([_USUAL_MARGIN, *map(len, endings)])

    def _ending_of(self, schema: Json) -> tuple[int, ...]:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = _matcher(self.vocabulary.tokenizer, source)
        if matcher.is_error():
            return ()
        nothing = Thinking(None, self.vocabulary)
        return find_ending(matcher, self.vocabulary, nothing, MAX_ENDING) or ()


def grammar_source(
    spec: StructuredOutputs, reasoning: Reasoning | None, special: Mapping[str, int]
) -> str:
    """Return the compiler's input.

    special: texts that are tokens of their own and no text. Raises BadRequestError for what a
    grammar cannot express.
    """
    answer = _answer(spec)
    if reasoning is None:
        return json.dumps({"grammars": [answer]})
    head = _reasoning_rules(reasoning, special)
    return json.dumps({"grammars": [{"lark_grammar": head}, {"name": "answer", **answer}]})


def _answer(spec: StructuredOutputs) -> Json:
    if spec.json_object:
        return {"json_schema": _with_options({"type": "object"}, spec)}
    if spec.json is not None:
        schema = checked_schema(parsed_schema(spec.json))
        num_chars = 0
        for pattern, place in patterns(schema):
            num_chars += len(pattern)
            _check_length(f"{place}, with the expressions before it,", num_chars)
            _check_pattern(pattern, place)
        return {"json_schema": _with_options(schema, spec)}
    if spec.choice is not None:
        if len(spec.choice) > MAX_CHOICES:
            raise BadRequestError(
                f"choice has {len(spec.choice):,} texts; it may have {MAX_CHOICES:,}."
            )
        texts = (json.dumps(text, ensure_ascii=False) for text in spec.choice)
        return {"lark_grammar": "start: " + " | ".join(texts)}
    if spec.regex is not None:
        _check_length("regex", len(spec.regex))
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(spec.regex, use_ascii='dw')}/"}
    assert spec.grammar is not None
    _check_grammar_length(spec.grammar)
    try:
        return {"lark_grammar": any_to_lark(spec.grammar)}
    except Exception as error:  # the converter has no error of its own
        raise BadRequestError(f"grammar: {_one_line(error)}") from None


def _with_options(schema: Json, spec: StructuredOutputs) -> Json:
    return {**schema, "x-guidance": json_options(compact=spec.disable_any_whitespace)}


def json_options(*, compact: bool) -> Json:
    """Return the compiler's options for JSON: how much whitespace, and no leniency."""
    if compact:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE}


def _reasoning_rules(reasoning: Reasoning, special: Mapping[str, int]) -> str:
    """Free text up to the marker, as rules before the rule `answer`."""
    if reasoning.end in special:
        thought = f"thought: free {marker(reasoning.end, special)}\nfree: /(.|\\n)*/"
    else:
        thought = f"thought[suffix={json.dumps(reasoning.end)}]: /(.|\\n)*/"
    begin = f"{marker(reasoning.start, special)} thought"
    part = "thought blank" if reasoning.is_open else f"({begin} blank)?"
    return f"start: {part} @answer\n{thought}\nblank: {_BLANK}\n"


def marker(text: str, special: Mapping[str, int]) -> str:
    """Return a text in a grammar, as the token that it is in `special`, else as text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)


# --- refusing -----------------------------------------------------------------------------------


def _matcher(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def _check_length(name: str, num_chars: int) -> None:
    if num_chars > MAX_GRAMMAR_CHARS:
        raise BadRequestError(
            f"{name} has {num_chars:,} characters; it may have {MAX_GRAMMAR_CHARS:,}."
        )


def _check_grammar_length(grammar: str) -> None:
    """Bound a grammar: as a whole, and without its schemas, of which only expressions count."""
    if len(grammar) > MAX_SCHEMA_CHARS:
        raise BadRequestError(
            f"grammar has {len(grammar):,} characters; with its schemas it may have "
            f"{MAX_SCHEMA_CHARS:,}."
        )
    num_chars, num_joined, decoder = len(grammar), grammar.count("&"), json.JSONDecoder()
    for found in _INLINE_JSON.finditer(grammar):
        try:
            schema, end = decoder.raw_decode(grammar, found.end())
            num_chars += sum(map(len, _expressions(schema))) - (end - found.end())
            num_joined -= grammar.count("&", found.end(), end)
        except ValueError:
            continue  # the compiler will say so
        except RecursionError:
            raise BadRequestError("grammar has a schema that is nested too deeply.") from None
    _check_length("grammar", num_chars)
    if num_joined > MAX_AMPERSANDS:
        raise BadRequestError(
            f"grammar has & {num_joined:,} times, schemas aside; it may have it {MAX_AMPERSANDS} "
            "times."
        )


def _expressions(value: object) -> Iterator[str]:
    """Yield what a schema that was not checked has of regular expressions."""
    if isinstance(value, dict):
        for key, child in value.items():
            if key == "pattern" and isinstance(child, str):
                yield child
            elif key == "patternProperties" and isinstance(child, dict):
                yield from child
            yield from _expressions(child)
    elif isinstance(value, list):
        for child in value:
            yield from _expressions(child)


def _check_pattern(pattern: str, place: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    source = llguidance.LLMatcher.grammar_from_json_schema(schema)
    problem = llguidance.LLMatcher.validate_grammar(source, limits=_LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise BadRequestError(f"{place}: {_one_line(problem)}")


def _refused(spec: StructuredOutputs, problem: str) -> OctavoError:
    """Return the compiler's complaint, with the place in a schema where it can be found."""
    place = spec.kind
    if spec.json is not None and "too large" not in problem:
        place = _place_of(checked_schema(parsed_schema(spec.json)), problem) or place
    if problem.startswith("oneOf"):
        return BadRequestError(
            f"{place}: oneOf is supported only where its schemas evidently exclude each other, as "
            "by a property with different const values. Use anyOf, or add such a property."
        )
    if "NoExtension" in problem:
        problem = "no text matches it."
    return BadRequestError(f"{place}: {_one_line(problem)}")


def _place_of(schema: Json, problem: str, max_tried: int = _MAX_PARTS) -> str | None:
    """Return the innermost schema that has the same problem when it is compiled alone."""
    for tried, (place, part) in enumerate(_parts(schema)):
        if tried == max_tried:
            return None
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(part))
        if llguidance.LLMatcher.validate_grammar(source, limits=_LIMITS) == problem:
            return place
    return None


def _parts(schema: Json) -> Iterator[tuple[str, Json]]:
    """Yield the place of every schema within one, and it as a schema of its own."""
    shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, sub in subschemas(schema, "json"):
        yield place, {**shared, **sub}


def _key(spec: StructuredOutputs, reasoning: Reasoning | None) -> str:
    value = getattr(spec, spec.kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"{spec.kind} is not JSON: {_one_line(error)}") from None
    return repr((spec.kind, text, spec.disable_any_whitespace, reasoning))


def compiled_too_late() -> BadRequestError:
    """Return the error of a grammar that was not there in time."""
    return BadRequestError(
        f"The grammar was not compiled within {COMPILE_SECONDS:.0f} seconds. Simplify it, or try "
        "again when fewer are compiled."
    )


def _one_line(problem: object) -> str:
    """Return a message of several lines as one, without drawings of where it is."""
    lines = (line.strip() for line in str(problem).splitlines())
    text = " ".join(line for line in lines if line.strip("^ |") and not _DRAWN.match(line))
    return text if len(text) <= 400 else f"{text[:399]}…"
