"""The menu: whole option names, defaults, and no import that would make it slow."""

import subprocess
import sys
from dataclasses import fields

import pytest

from octavo.cli.settings import SAMPLING_OPTIONS
from octavo.config import EngineConfig
from tests.cli.conftest import Octavo

HEAVY = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "gguf", "rich", "threadpoolctl")


@pytest.mark.parametrize("command", ["generate", "chat", "run"])
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_shows_every_option_by_its_whole_name(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = octavo(command, "--help").out.split()
    for setting in (*fields(EngineConfig), *SAMPLING_OPTIONS):
        if setting.name != "model":
            assert "--" + setting.name.replace("_", "-") in words


def test_help_shows_defaults(octavo: Octavo) -> None:
    text = " ".join(octavo("generate", "--help").out.split())
    assert "[default: smollm2-135m]" in text
    assert "Tokens per block of the KV cache. One of 16, 32, 64, 128, 256. [default: 32]" in text
    assert "[default: the model's, else 0]" in text


def test_help_groups_options(octavo: Octavo) -> None:
    lines = octavo("generate", "--help").out.splitlines()
    assert [line for line in lines if line in ("Options:", "Sampling:", "Engine:")] == [
        "Options:",
        "Sampling:",
        "Engine:",
    ]


def test_bare_command_shows_the_menu(octavo: Octavo) -> None:
    assert octavo() == octavo("--help")


def test_version(octavo: Octavo) -> None:
    from octavo import __version__

    assert octavo("version").out == f"{__version__}\n"


@pytest.mark.parametrize("statement", ["import octavo", "octavo --help", "octavo generate --help"])
def test_nothing_heavy_is_imported_for(statement: str) -> None:
    if statement.startswith("octavo"):
        arguments = statement.split()
        statement = f"import sys; sys.argv = {arguments}; from octavo.cli.main import main; main()"
    code = f"""
import sys
try:
    exec({statement!r})
except SystemExit:
    pass
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
