"""Imports point down, and time enters as an argument."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "octavo"
CORE_MAY_IMPORT = {
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "hashlib",
    "itertools",
    "octavo",
    "operator",
    "typing",
}


def imported(file: Path) -> Iterator[str]:
    """Yield every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_point_down() -> None:
    # In a process of its own: the linter disables every logger that exists, and changes sys.path.
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_only_the_clock_imports_time() -> None:
    """Everything else is given a clock, so that a trace replays exactly."""
    users = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        if "time" in set(imported(file))
    ]
    assert users == ["engine/clock.py"]


@pytest.mark.parametrize("file", sorted((PACKAGE / "core").glob("*.py")), ids=lambda f: f.name)
def test_core_is_pure_python(file: Path) -> None:
    assert {name.partition(".")[0] for name in imported(file)} <= CORE_MAY_IMPORT


def test_no_package_imports_another_ones_private_names() -> None:
    private = []
    for file in sorted(PACKAGE.rglob("*.py")):
        own = ".".join(["octavo", *file.relative_to(PACKAGE).parts[:-1]])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.startswith("octavo") and node.module != own:
                names = [alias.name for alias in node.names if re.match("_[^_]", alias.name)]
                private += [f"{file.relative_to(PACKAGE)}: {name}" for name in names]
    assert not private


# What takes long to import and some starts have no use for: by module, what it must not bring.
LIGHT_STARTS = {
    # Before a server's engine is started: nothing but the standard library.
    "octavo.cli.main": {"typer", "msgspec", "numpy", "pydantic", "fastapi", "asyncio"},
    # Before the process that computes is tied to its parent.
    "octavo.engine.child": {"msgspec", "numpy", "llguidance", "tokenizers"},
    # What it then runs.
    "octavo.engine.port": {
        *("fastapi", "pydantic", "uvicorn", "asyncio", "typer", "jinja2", "prometheus_client"),
        *("tokenizers", "gguf", "huggingface_hub", "octavo.server", "octavo.planning"),
    },
    "octavo.llm": {"fastapi", "pydantic", "uvicorn", "typer", "jinja2", "tokenizers", "gguf"},
    "octavo.server.run": {"typer", "jinja2", "tokenizers", "gguf", "octavo.planning"},
}


@pytest.mark.parametrize("module", LIGHT_STARTS)
def test_what_a_start_does_not_need_is_not_imported(module: str) -> None:
    command = [sys.executable, "-c", f"import {module}, sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert LIGHT_STARTS[module].isdisjoint(done.stdout.split())
