"""Events that the oracle saw, printed at the end of the run."""

from collections import Counter
from collections.abc import Iterator

import pytest

_EVENTS = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def events(pytestconfig: pytest.Config) -> Counter[str]:
    """What happened to sequences and blocks in the tests that count it, in this process."""
    return pytestconfig.stash.setdefault(_EVENTS, Counter())


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    counted = terminalreporter.config.stash.get(_EVENTS, Counter())
    if counted:
        terminalreporter.section("what the core machine met")
        for name, count in sorted(counted.items()):
            terminalreporter.write_line(f"{name:24} {count:8,}")
    return (yield)
