"""A server for tests that leave it as they found it."""

import pytest

from tests.server.serving import Calls, ThreadServer


@pytest.fixture(scope="session")
def shared_server():
    with ThreadServer() as server:
        yield server


@pytest.fixture
def calls(shared_server: ThreadServer):
    with shared_server.calls() as calls:
        yield calls


__all__ = ["Calls"]
