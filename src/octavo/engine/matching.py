"""One sequence's place in its grammar: which tokens may come next, and how it could end.

Decides when a sequence is complete, and when its remaining tokens only just suffice for a valid
ending, which is then forced. Knows neither requests nor the loop: `GrammarMatcher` is a plain
object that one thread uses at a time.

Invariant: the matcher has consumed exactly the tokens that it was told of, and a token that it did
not allow is an error, never skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.request import Reasoning
from octavo.weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.grammar import Grammar

Mask = NDArray[np.uint32]

MAX_ENDING = 256  # tokens of an ending
# The library follows references by recursion; a thread's usual 8 MiB end at some 3,000 of them, and
# the process with it. What is not used takes no memory.
STACK_BYTES = 128 << 20
_RETRY = 16
# Masks that a search for an ending computes, about a quarter of a millisecond each, and how many
# tokens it tries one by one.
_MAX_LOOKS, _FEW = 128, 32


def deep_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return threads in which the library may follow as many references as a grammar can have."""
    pool, gate = ThreadPoolExecutor(number, name), threading.Barrier(number)
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(number):  # each starts a thread, since those before it wait
            pool.submit(gate.wait)
        return pool
    except RuntimeError:  # no memory for a thread: let those go that wait
        gate.abort()
        raise
    finally:
        threading.stack_size(before)


class GrammarVocabulary:
    """A tokenizer as the grammar library takes it.

    vocab_size: of the model; ids without a token are never allowed. special: the texts of tokens
    that are no text, and their ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        ends = [i for i in tokenizer.eos_ids if i < vocab_size]
        if not ends:  # the library needs an end token: one that the model cannot draw
            ends = [vocab_size]
            tokens.append(b"")
        self.vocab_size = vocab_size
        self.end_ids = ends
        special = sorted({i for i in tokenizer.special_ids if i < known} | set(ends))
        self.special = {tokens[i].decode("utf-8", "replace"): i for i in special}
        self.tokens = tokens
        self.encode = partial(tokenizer.encode, add_bos=False)
        adapter = _Adapter(tokens, special, ends[0], self.encode)
        wrapper = llguidance.TokenizerWrapper(adapter)
        self.tokenizer = llguidance.LLTokenizer(wrapper, eos_token=ends)
        self._ids = {content: i for i, content in enumerate(tokens) if i not in set(special)}
        self._in_text, self._outside = _preferences(tokens, set(special))
        self._is_text = [self._ids[letter] for letter in (b"q", b"}") if letter in self._ids]

    def longest(self, forced: bytes) -> int | None:
        """Return the token that covers most of the bytes that must come next."""
        for length in range(min(len(forced), 32), 0, -1):
            token = self._ids.get(forced[:length])
            if token is not None:
                return token
        return None

    def closing(self, allowed: NDArray[np.intp]) -> int:
        """Return the allowed token that is the likeliest to bring an end nearer."""
        in_text = bool(np.isin(self._is_text, allowed).all())
        ranks = (self._in_text if in_text else self._outside)[allowed]
        return int(allowed[ranks.argmin()])

    def unpacked(self, mask: Mask) -> NDArray[np.intp]:
        """Return the ids that a mask allows, ascending."""
        return np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little"))

    def only(self, token: int) -> Mask:
        """Return the mask that allows one token."""
        mask = np.zeros((self.vocab_size + 31) // 32, np.uint32)
        mask[token // 32] = 1 << token % 32
        return mask


class _Adapter:
    """The attributes that the library asks of a tokenizer."""

    def __init__(
        self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos, None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _preferences(
    tokens: list[bytes], special: set[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return two ranks per token, the best first: inside of a text in quotes, and outside."""

    def order(i: int, first: bytes, last: bytes) -> tuple[int, int, int]:
        token = tokens[i]
        if not token or i in special:
            return 5, 0, i
        if not token.strip(b'"}]'):
            kind = 0 if token[:1] in (first[:1], first[1:2]) else 1
            return kind, len(token) if token[:1] in last else -len(token), i
        if token.isdigit():
            return 2, len(token), i
        return 4 if token.isspace() else 3, len(token), i

    ranks = []
    for first, last in ((b'"', b"}]"), (b"}]", b'"')):
        sequence = sorted(range(len(tokens)), key=lambda i: order(i, first, last))
        rank = np.empty(len(tokens), np.int32)
        rank[sequence] = np.arange(len(tokens))
        ranks.append(rank)
    return ranks[0], ranks[1]


class Thinking:
    """Whether an output is in its reasoning part: `part` is set as long as it is."""

    def __init__(self, reasoning: Reasoning | None, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._seen = b""
        self._reasoning = reasoning  # None once the part is over, or cannot come any more
        self.part = reasoning if reasoning is not None and reasoning.is_open else None

    def copy(self) -> Thinking:
        """Return the same state, to be led elsewhere."""
        other = Thinking(self._reasoning, self._vocabulary)
        other._seen, other.part = self._seen, self.part
        return other

    def push(self, token_ids: Iterable[int]) -> None:
        """Follow the markers of the part, which may be cut over tokens."""
        for token in token_ids:
            if self._reasoning is not None:
                self._follow(self._reasoning, self._vocabulary.tokens[token])

    def _follow(self, reasoning: Reasoning, content: bytes) -> None:
        start, end = reasoning.start.encode(), reasoning.end.encode()
        self._seen += content
        if self.part is None and self._seen.startswith(start):
            self.part, self._seen = reasoning, self._seen[len(start) :]
        elif self.part is None and not start.startswith(self._seen):
            self._reasoning = None
        if self.part is not None:
            if end in self._seen:
                self.part = self._reasoning = None
            self._seen = self._seen[-len(end) :]


def next_mask(matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary) -> Mask | None:
    """Return which tokens may come next, or None if the matcher has stopped or failed."""
    if matcher.is_stopped():
        return None
    words = np.zeros((len(vocabulary.tokens) + 31) // 32, np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        return None
    # An end token that the library needed and the model lacks may take up a word of its own.
    return words[: (vocabulary.vocab_size + 31) // 32]


def find_ending(
    matcher: llguidance.LLMatcher,
    vocabulary: GrammarVocabulary,
    thinking: Thinking,
    limit: int,
    *,
    is_thorough: bool = True,
) -> tuple[int, ...] | None:
    """Return at most `limit` tokens after which the output is valid, or None if none were found.

    What must come is taken. Where few tokens may come, as at a choice between values, each is
    tried; where many may, only the one that closes a text, an object or an array. So the ending is
    the shortest where the choices are few and looked at within `_MAX_LOOKS`, else a short one.
    Unless `is_thorough`, only the likeliest is tried everywhere.
    """
    search = _EndingSearch(vocabulary, limit)
    search.follow(matcher.deep_copy(), thinking.copy(), [])
    while is_thorough and search.waiting and search.num_looks < _MAX_LOOKS:
        before, thought, ending, token = search.waiting.popleft()
        probe, thought = before.deep_copy(), thought.copy()
        if len(ending) + 1 <= search.limit and probe.consume_token(token):
            thought.push((token,))
            search.follow(probe, thought, [*ending, token])
    return search.best


class _EndingSearch:
    """Endings found so far: the best, and choices that were passed by, the earliest first.

    limit: most tokens of an ending that would be better.
    """

    def __init__(self, vocabulary: GrammarVocabulary, limit: int) -> None:
        self._vocabulary = vocabulary
        self.limit = limit
        self.best: tuple[int, ...] | None = None
        self.waiting: deque[tuple[llguidance.LLMatcher, Thinking, list[int], int]] = deque()
        self.num_looks = 0

    def follow(self, probe: llguidance.LLMatcher, thinking: Thinking, ending: list[int]) -> None:
        """Go on by the likeliest token to an end that is better than the best."""
        while not probe.is_accepting():
            if thinking.part is not None:
                tokens = _leaving(thinking.part, self._vocabulary)
            else:
                tokens = self._nearer(probe, thinking, ending)
            ending = ending + tokens
            if not tokens or len(ending) > self.limit or not probe.consume_tokens(tokens):
                return
            thinking.push(tokens)
        self.best, self.limit = tuple(ending), len(ending) - 1

    def _nearer(
        self, probe: llguidance.LLMatcher, thinking: Thinking, ending: list[int]
    ) -> list[int]:
        """Return the token that comes next on the way to an end, or nothing where there is no way.

        If it is one of a few, the others wait to be tried.
        """
        token = self._vocabulary.longest(probe.compute_ff_bytes())
        if token is not None:
            return [token]
        self.num_looks += 1
        mask = next_mask(probe, self._vocabulary)
        if mask is None or not mask.any():
            return []
        allowed = self._vocabulary.unpacked(mask)
        chosen = self._vocabulary.closing(allowed)
        if len(allowed) <= _FEW:
            before, thought = probe.deep_copy(), thinking.copy()
            others = [(before, thought, ending, int(t)) for t in allowed if t != chosen]
            self.waiting.extend(others)
        return [chosen]


def _leaving(reasoning: Reasoning, vocabulary: GrammarVocabulary) -> list[int]:
    token = vocabulary.special.get(reasoning.end)
    return vocabulary.encode(reasoning.end) if token is None else [token]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a sequence may do next. mask: None if the output is complete.

    is_forced: the mask leaves only the tokens of an ending, or the output is complete by them.
    """

    mask: Mask | None
    is_forced: bool = False


class GrammarMatcher:
    """The state of one sequence.

    max_tokens: of its output. ignores_end: the output goes on past the model's end tokens, so the
    grammar must not end it by one.
    """

    def __init__(self, grammar: Grammar, *, max_tokens: int, ignores_end: bool) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.prototype.deep_copy()
        self._ignores_end = ignores_end
        # With few tokens, most of them are for the answer all the same.
        self._margin = min(grammar.margin, max_tokens // 3)
        self._ending = list(grammar.ending or ())
        self._is_forced = False
        self._thinking = Thinking(grammar.reasoning, grammar.vocabulary)
        self.num_left = max_tokens
        self._num_to_check: int | None = self._num_safe(len(self._ending))
        if grammar.ending is None or len(self._ending) > max_tokens:
            self._num_to_check = None
        elif self._num_to_check == 0:
            self._is_forced = True

    def start(self) -> Turn:
        """Return what the first token may be."""
        return self._turn()

    def advance(self, token: int) -> Turn:
        """Consume a token and return what the next may be; raises OctavoError."""
        if not self._matcher.consume_token(token):
            raise OctavoError(
                f"Token {token} does not fit the grammar: "
                f"{self._matcher.get_error() or 'it was not allowed'}."
            )
        self._thinking.push((token,))
        self.num_left -= 1
        if self._is_forced:
            del self._ending[:1]
        else:
            self._look_ahead()
        return self._turn()

    def _turn(self) -> Turn:
        if self._is_forced:
            if not self._ending:
                return Turn(None, is_forced=True)
            return Turn(self._vocabulary.only(self._ending[0]), is_forced=True)
        mask = next_mask(self._matcher, self._vocabulary)
        if self._matcher.is_error():
            raise OctavoError(f"The grammar is beyond its limits: {self._matcher.get_error()}.")
        if mask is not None and self._ignores_end:
            for end in self._vocabulary.end_ids:
                if end < self._vocabulary.vocab_size:
                    mask[end // 32] &= ~np.uint32(1 << end % 32)
        return Turn(mask if mask is not None and mask.any() else None)

    def _look_ahead(self) -> None:
        """From time to time, see how far the end is; force it once the tokens only just suffice."""
        if self._num_to_check is None:
            return
        self._num_to_check -= 1
        if self._num_to_check > 0 or self._matcher.is_stopped():
            return
        ending = self._find_ending()
        if ending is None:
            # Too late, or an end that the search does not see from here: try again elsewhere.
            self._num_to_check = _RETRY
            return
        self._num_to_check = self._num_safe(len(ending))
        if self._num_to_check == 0:
            self._is_forced, self._ending = True, list(ending)

    def _find_ending(self) -> tuple[int, ...] | None:
        """Return the first ending found that leaves room, else the shortest."""
        ending: tuple[int, ...] | None = None
        for is_thorough in (False, True):
            ending = find_ending(
                self._matcher,
                self._vocabulary,
                self._thinking,
                min(MAX_ENDING, self.num_left),
                is_thorough=is_thorough,
            )
            if ending is not None and self._num_safe(len(ending)):
                break
        return ending

    def _num_safe(self, num_ending: int) -> int:
        """Return after how many tokens to look again, if each may put off the end by a margin."""
        slack = self.num_left - num_ending - self._margin
        return 0 if slack <= 0 else max(1, slack // (self._margin + 1))
