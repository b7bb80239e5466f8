"""Which machine of a fleet a request is sent to.

Decides between machines by what a router knows of them: what it sent there and what has come back,
and which beginnings their caches hold. Knows no engine and no time but the moments it is told.

Invariant: the same requests at the same moments go to the same machines.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.errors import SettingError, nearest

Prompt = list[int]


@dataclass(slots=True)
class Ledger:
    """What a router has outstanding at one machine: tokens of prompts and answers not yet ended."""

    outstanding: int = 0
    _ends: deque[tuple[float, int]] = field(default_factory=deque)

    def send(self, num_tokens: int) -> None:
        """Add a request."""
        self.outstanding += num_tokens

    def end(self, moment: float, num_tokens: int) -> None:
        """Note that a request ends at a moment, which is not before the last one's."""
        self._ends.append((moment, num_tokens))

    def settle(self, now: float) -> None:
        """Take off what has ended by now."""
        while self._ends and self._ends[0][0] <= now:
            self.outstanding -= self._ends.popleft()[1]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One machine as the router sees it. found: prompt tokens that its cache holds."""

    outstanding: int
    found: Callable[[Prompt], int]


# number: how many requests came before. Returns the index of a machine.
Router = Callable[[int, Prompt, Sequence[Candidate]], int]


def round_robin(number: int, prompt: Prompt, machines: Sequence[Candidate]) -> int:
    """Return each machine in turn."""
    return number % len(machines)


def least_loaded(number: int, prompt: Prompt, machines: Sequence[Candidate]) -> int:
    """Return the machine with the fewest tokens outstanding, the first of several."""
    return _least([machine.outstanding for machine in machines])


def prefix_aware(number: int, prompt: Prompt, machines: Sequence[Candidate]) -> int:
    """Return the machine with the fewest tokens outstanding, less what it need not compute."""
    return _least([machine.outstanding - machine.found(prompt) for machine in machines])


def _least(scores: Sequence[int]) -> int:
    return scores.index(min(scores))


ROUTERS: Mapping[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}


def router_named(name: str) -> Router:
    """Return a router; raises `SettingError` that lists them."""
    found = ROUTERS.get(name)
    if found is None:
        raise SettingError(
            f"There is no router {name!r}.{nearest(name, ROUTERS)} There are {', '.join(ROUTERS)}."
        )
    return found
