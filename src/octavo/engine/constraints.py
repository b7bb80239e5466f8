"""Masks for the sequences that have a grammar, computed beside the engine's loop.

Decides which sequences wait for their mask and how long a step may wait for all of them. Owns each
constrained sequence's matcher from its first step until it is dropped; a sample of the same prompt
has one of its own. Knows neither order nor blocks.

Invariant: a mask is handed out only if its matcher has consumed all of the sequence's output.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.engine.grammar import Grammar
from octavo.engine.matching import GrammarMatcher, Mask, Turn, deep_threads
from octavo.request import Sequence

# Seconds that a step waits for masks that were begun after the last one. A mask that takes longer
# holds up its own sequence alone.
PATIENCE = 0.005
_NUM_THREADS = 2


@dataclass(slots=True, eq=False)
class _Place:
    """Where a sequence stands: a matcher that has consumed `num_consumed` tokens of its output."""

    matcher: GrammarMatcher
    turn: Future[Turn]
    num_consumed: int = 0
    is_late: bool = False


class Constraints:
    """The matchers of all constrained sequences."""

    def __init__(self) -> None:
        self._places: dict[Sequence, _Place] = {}
        self._pending: dict[Sequence, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return deep_threads(_NUM_THREADS, "octavo-mask")

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        """Begin with a sequence that has no output yet."""
        request = sequence.request
        matcher = GrammarMatcher(
            grammar, max_tokens=request.max_tokens, ignores_end=request.params.ignore_eos
        )
        self._follow(sequence, _Place(matcher, self._threads.submit(matcher.start)))

    def advance(self, sequence: Sequence, grammar: Grammar, token_id: int) -> None:
        """Tell of a sequence's new token; a sample that appears with its first begins here."""
        if sequence not in self._places:
            self.add(sequence, grammar)
        place = self._places[sequence]
        place.num_consumed += 1
        assert place.num_consumed == sequence.num_output_tokens, "the matcher is out of step"
        before = place.turn
        place.is_late = False
        place.turn = self._threads.submit(_advance, place.matcher, before, token_id)
        self._follow(sequence, place)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; an unknown one is ignored."""
        self._places.pop(sequence, None)
        self._pending.pop(sequence, None)

    def mask_of(self, sequence: Sequence) -> Mask | None:
        """Return which tokens a sequence may draw now; None is every token."""
        place = self._places.get(sequence)
        if place is None:
            return None
        assert place.num_consumed == sequence.num_output_tokens, "the matcher is out of step"
        return place.turn.result().mask

    def is_forced(self, sequence: Sequence) -> bool:
        """Whether the last mask left nothing but the next token of an ending."""
        place = self._places.get(sequence)
        return place is not None and place.turn.result().is_forced

    def settle(self) -> Iterator[tuple[Sequence, Turn | BaseException]]:
        """Wait a little for new masks; yield each sequence that can draw no more, and why.

        A `Turn` without a mask is a complete output; an exception is a failure.
        """
        new = [place.turn for place in self._pending.values() if not place.is_late]
        if new:
            wait(new, timeout=PATIENCE)
        for sequence, place in list(self._pending.items()):
            if not place.turn.done():
                place.is_late = True
                continue
            del self._pending[sequence]
            error = place.turn.exception()
            if error is not None:
                yield sequence, error
            elif place.turn.result().mask is None:
                yield sequence, place.turn.result()

    @property
    def held(self) -> frozenset[Sequence]:
        """The sequences whose masks are not ready."""
        return frozenset(self._pending)

    def wait(self, others: list[Future[Grammar]], seconds: float) -> None:
        """Wait until a mask or one of `others` is ready."""
        pending: list[Future[Any]] = [place.turn for place in self._pending.values()]
        wait([*pending, *others], timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._pending.clear()
        if "_threads" in self.__dict__:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _follow(self, sequence: Sequence, place: _Place) -> None:
        self._places[sequence] = place
        self._pending[sequence] = place


def _advance(matcher: GrammarMatcher, before: Future[Turn], token_id: int) -> Turn:
    before.result()  # a sample's first turn may be under way in another thread
    return matcher.advance(token_id)
