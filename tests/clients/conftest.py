"""Other people's clients against a live server: `make clients`.

Runs in an environment without Octavo; the server comes from the one that `--octavo` names.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from serving import LiveServer

ROOT = Path(__file__).parents[2]
TOLD = ("openai", "langchain-openai", "litellm", "llm", "lm-eval")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--octavo", default=ROOT / ".venv/bin/octavo", type=Path)
    parser.addoption("--serve", default="", help="further options of octavo serve")


def pytest_report_header() -> str:
    told = []
    for name in TOLD:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return "clients: " + ", ".join(told)


@pytest.fixture(scope="session")
def octavo(request: pytest.FixtureRequest) -> Path:
    """The command."""
    return request.config.getoption("--octavo").absolute()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, octavo: Path) -> Iterator[LiveServer]:
    """The server that tests share, as anybody would start it."""
    with LiveServer(octavo, *request.config.getoption("--serve").split()) as server:
        yield server
        assert server.stop() == 0, server.lines
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\nfields that clients sent and the server ignored:", *server.ignored() or ["none"])


@pytest.fixture(scope="session")
def model() -> str:
    """The default model's short name."""
    return "smollm2-135m"
