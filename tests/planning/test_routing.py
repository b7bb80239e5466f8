"""Which machine of a fleet a request is sent to."""

import pytest

from octavo.errors import SettingError
from octavo.planning.routing import (
    ROUTERS,
    Candidate,
    Ledger,
    least_loaded,
    prefix_aware,
    round_robin,
    router_named,
)


def machine(outstanding: int, found: int = 0) -> Candidate:
    return Candidate(outstanding, lambda prompt: min(found, len(prompt)))


PROMPT = list(range(100))


def test_round_robin_takes_turns_whatever_they_have_to_do() -> None:
    fleet = [machine(9000), machine(0), machine(5)]
    assert [round_robin(number, PROMPT, fleet) for number in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_fewest_tokens_and_the_first_of_equals() -> None:
    assert least_loaded(7, PROMPT, [machine(30), machine(10), machine(10)]) == 1
    assert least_loaded(7, PROMPT, [machine(0), machine(0)]) == 0


def test_prefix_aware_goes_where_the_prompt_is_unless_that_costs_more_than_it_saves() -> None:
    assert prefix_aware(0, PROMPT, [machine(0), machine(50, found=64)]) == 1
    assert prefix_aware(0, PROMPT, [machine(0), machine(70, found=64)]) == 0
    assert prefix_aware(0, PROMPT, [machine(20), machine(10)]) == 1


def test_tokens_are_outstanding_until_their_request_has_ended() -> None:
    ledger = Ledger()
    ledger.send(100)
    ledger.send(20)
    ledger.end(2.0, 100)
    ledger.settle(1.9)
    assert ledger.outstanding == 120
    ledger.settle(2.0)
    assert ledger.outstanding == 20


def test_an_unknown_router_names_the_nearest_and_all() -> None:
    with pytest.raises(SettingError, match=r"Did you mean 'least-loaded'.*round-robin"):
        router_named("leastloaded")
    assert all(router_named(name) is router for name, router in ROUTERS.items())
