"""Runs the command line in this process, as `main` does for a user."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.cli.main import main

TINY = Path(__file__).parent.parent / "golden" / "tiny" / "llama"
# A small pool: the tests then do not depend on how much memory is free.
SMALL = ("--num-gpu-blocks-override", "64")


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


Octavo = Callable[..., Finished]


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Octavo:
    """A function that runs `octavo ARGUMENTS` with `stdin` as its standard input."""

    def run(*arguments: str, stdin: str | bytes = "") -> Finished:
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
        typed = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Finished(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, which the commands use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    return folder


@pytest.fixture
def bare_model(tmp_path: Path) -> Path:
    """The tiny model without its chat template."""
    folder = tmp_path / "bare"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("logits.npz"))
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text())
    del values["chat_template"]
    file.write_text(json.dumps(values))
    return folder
