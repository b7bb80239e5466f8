"""Prints, at the end of the run, the events that the oracle met."""

from collections import Counter
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    events: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name == "core_events" and report.when == "call":
                events.update(value)
    if events:
        terminalreporter.section("what the core machine met")
        for name, count in sorted(events.items()):
            terminalreporter.write_line(f"{name:24} {count:8,}")
    return (yield)
