"""`octavo explain` against a live server, and against what is none."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.cli.conftest import Octavo
from tests.cli.test_errors import assert_one_line
from tests.server.serving import ThreadServer, checked, completion


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    with ThreadServer() as server, server.calls() as calls:
        headers = {"x-request-id": "one"}
        checked(calls.post("/v1/completions", json=completion(), headers=headers))
        yield server


def test_words_and_a_table_that_adds_up(octavo: Octavo, server: ThreadServer) -> None:
    done = octavo("explain", "one", "--url", server.address)
    assert (done.code, done.err) == (0, "")
    head, _, rest = done.out.partition("\n\n")
    words, _, table = rest.partition("\n\n")
    assert head == "cmpl-one (tiny, ended)"
    assert "8 tokens: 7 steps" in words
    *parts, total = [float(line.split()[0].replace(",", "")) for line in table.splitlines()]
    assert sum(parts) == pytest.approx(total, abs=0.1 * len(parts))


def test_json_is_what_the_server_says(octavo: Octavo, server: ThreadServer) -> None:
    told = json.loads(octavo("explain", "one", "--url", server.address + "/", "--json").out)
    with server.calls() as calls:
        assert told == calls.get("/v1/requests/one/explain").json()


def test_id_that_is_gone_is_one_line(octavo: Octavo, server: ThreadServer) -> None:
    done = octavo("explain", "two", "--url", server.address)
    assert_one_line(done, 1, "'two'", "1,000", "3,600 s", "--explain-seconds")


def test_no_server_is_one_line_that_says_where_it_looked(octavo: Octavo) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert_one_line(octavo("explain", "one", "--url", url), 1, url, "octavo serve", "--url")


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "", "ftp://x"])
def test_address_that_is_no_http_is_refused(octavo: Octavo, url: str) -> None:
    assert_one_line(octavo("explain", "one", "--url", url), 1, "--url", "http://")


@pytest.mark.parametrize(
    ("status", "content"),
    [(200, b"<html>"), (200, b"[]"), (404, b"not here"), (404, b'{"error": {"message": "no"}}')],
)
def test_server_that_is_not_octavo_is_one_line(octavo: Octavo, status: int, content: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        assert_one_line(octavo("explain", "one", "--url", url), 1, url, "Octavo?")


def test_key_comes_from_the_environment(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("anna\n")
    with ThreadServer(api_key_file=str(path)) as server:
        with server.calls(headers={"authorization": "Bearer anna"}) as calls:
            headers = {"x-request-id": "one"}
            checked(calls.post("/v1/completions", json=completion(), headers=headers))
        assert_one_line(octavo("explain", "one", "--url", server.address), 1, "API key")
        monkeypatch.setenv("OPENAI_API_KEY", "anna")
        assert octavo("explain", "one", "--url", server.address).code == 0
