"""The grammars of requests and the masks of their sequences, made beside the engine's loop.

Decides how long a request may wait for its grammar, which sequences wait for their mask and how
long a step may wait for all of them. Owns a request's grammar until it is forgotten, and each
constrained sequence's matcher from its first step until it is dropped; a sample of the same prompt
has one of its own. Knows neither order nor blocks.

Invariant: a mask is handed out only if its matcher has consumed all of the sequence's output.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.engine.grammar import (
    COMPILE_SECONDS,
    Grammar,
    GrammarCompiler,
    compiled_too_late,
)
from octavo.engine.matching import GrammarMatcher, Mask, Turn, deep_threads
from octavo.errors import BadRequestError
from octavo.request import Request, Sequence

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
    """The grammars and matchers of everything constrained; what is not, is ignored.

    compiler: of grammars; without it they are refused.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._compiling: dict[Request, Future[Grammar]] = {}
        self._grammars: dict[Request, Grammar] = {}
        self._places: dict[Sequence, _Place] = {}
        self._pending: dict[Sequence, _Place] = {}

    def __len__(self) -> int:
        return len(self._compiling) + len(self._grammars) + len(self._places)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return deep_threads(_NUM_THREADS, "octavo-mask")

    # --- grammars -------------------------------------------------------------------------------

    def compile(self, request: Request) -> bool:
        """Begin with a request's grammar; False if it has none. Raises `BadRequestError`."""
        spec = request.params.structured_outputs
        if spec is None:
            return False
        if self._compiler is None:
            raise BadRequestError("This model came without a tokenizer, so it has no grammars.")
        self._compiling[request] = self._compiler.compile(spec, request.params.reasoning)
        return True

    def compiled(self, now: float) -> Iterator[tuple[Request, BaseException | None]]:
        """Yield each request whose grammar has come, or what it failed with."""
        for request, grammar in list(self._compiling.items()):
            if grammar.done():
                error = grammar.exception()
            elif now - request.arrival_time >= COMPILE_SECONDS:
                error = compiled_too_late()
            else:
                continue
            del self._compiling[request]
            if error is None:
                self._grammars[request] = grammar.result()
            yield request, error

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def forget(self, request: Request) -> None:
        """Forget the grammar of a request that has ended."""
        self._compiling.pop(request, None)
        self._grammars.pop(request, None)

    # --- masks ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Begin with a sequence that has no output yet, of a request whose grammar has come."""
        request = sequence.request
        matcher = GrammarMatcher(
            self._grammars[request],
            max_tokens=request.max_tokens,
            ignores_end=request.params.ignore_eos,
        )
        self._follow(sequence, _Place(matcher, self._threads.submit(matcher.start)))

    def advance(self, sequence: Sequence, token_id: int) -> None:
        """Tell of a sequence's new token; a sample that appears with its first begins here."""
        if sequence.request not in self._grammars:
            return
        if sequence not in self._places:
            self.add(sequence)
        place = self._places[sequence]
        place.num_consumed += 1
        assert place.num_consumed == sequence.num_output_tokens, "the matcher is out of step"
        before = place.turn
        place.is_late = False
        place.turn = self._threads.submit(_advance, place.matcher, before, token_id)
        self._follow(sequence, place)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
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
    def is_settled(self) -> bool:
        """Whether no grammar is being compiled and no mask is missing."""
        return not (self._compiling or self._pending)

    @property
    def held(self) -> frozenset[Sequence]:
        """The sequences whose masks are not ready."""
        return frozenset(self._pending)

    def wait(self, seconds: float) -> None:
        """Wait until a mask or a grammar is ready."""
        masks: list[Future[Any]] = [place.turn for place in self._pending.values()]
        wait([*masks, *self._compiling.values()], timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Forget everything, and compile nothing any more."""
        if self._compiler is not None:
            self._compiler.close()
        self._compiling.clear()
        self._grammars.clear()
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
