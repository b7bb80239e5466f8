"""Options and markers of the whole suite: `--cases` tells which fault is tested where."""

import re
import signal
import tomllib
from pathlib import Path

import pytest

from tests.engines import tiny

TESTS = Path(__file__).parent
# Other people's clients have an environment of their own: `make clients`.
collect_ignore = ["clients"]
SHARED_CASES = TESTS.parent.parent / "shared" / "cases.md"
# A shell lets what it starts in the background ignore interrupts, and so would the programs that
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", action="store_true", help="print case id -> tests, and stop")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--cases"):
        missing = print_cases(session.items)
        pytest.exit(
            f"{len(missing)} cases have neither test nor reason: {', '.join(missing)}"
            if missing
            else "Every case has a test, or a reason why it does not apply yet.",
            returncode=1 if missing else 0,
        )


def print_cases(items: list[pytest.Item]) -> list[str]:
    """Print each case with its tests or the reason why it has none; return those with neither."""
    tests: dict[str, list[str]] = {}
    for item in items:
        for marker in item.iter_markers("case"):
            for case in marker.args:
                name = item.nodeid.partition("[")[0]
                if name not in tests.setdefault(case, []):
                    tests[case].append(name)
    reasons = tomllib.loads((TESTS / "cases.toml").read_text())
    known = set(tests) | set(reasons)
    if SHARED_CASES.exists():
        known |= set(re.findall(r"\*\*([VS]\d+)\*\*", SHARED_CASES.read_text()))
    print()
    for case in sorted(known):
        for test in tests.get(case, []):
            print(f"{case}  {test}")
        if case not in tests:
            print(f"{case}  -- {reasons.get(case, 'no test and no reason')}")
    return sorted(known - set(tests) - set(reasons))


@pytest.fixture
def llm():
    """A tiny model with blocks of 16."""
    with tiny(block_size=16) as llm:
        yield llm


@pytest.fixture
def cold():
    """The same model, without a prefix cache."""
    with tiny(block_size=16, enable_prefix_caching=False) as llm:
        yield llm
