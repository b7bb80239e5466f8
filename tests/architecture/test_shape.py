"""Small is a choice made at every commit: the shape of files, functions and docstrings."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "src" / "octavo"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_DOCSTRING_LINES = 10
# A module may draw what it holds: these docstrings are tables.
DRAWN = {"errors.py"}


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


each_file = pytest.mark.parametrize("file", FILES, ids=name_of)


@each_file
def test_file_is_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@each_file
def test_functions_are_short(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    long = {
        node.name: length
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@each_file
def test_module_docstring_says_what_it_decides_in_ten_lines(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, "a module says what it decides"
    summary, _, body = docstring.partition("\n\n")
    assert "\n" not in summary
    assert summary[-1] in ".:"
    if name_of(file) not in DRAWN:
        assert len(body.splitlines()) <= MAX_DOCSTRING_LINES
