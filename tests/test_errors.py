"""The tree of exceptions: what its docstring draws, its statuses, and its words."""

import inspect
import re

import pytest

from octavo import errors
from octavo.errors import InvalidParameterError, OctavoError, nearest, shorten

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
}


def test_the_docstring_draws_the_tree_as_it_is():
    """Each line has a name and a status; four columns of indent are one level."""
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error) +(\d{3}) ", line)
        if found:
            level = len(found[1]) // 4
            path[level:] = [found[2]]
            drawn[found[2]] = (path[level - 1] if level else "Exception", int(found[3]))
    actual = {name: (kind.__base__.__name__, kind.status) for name, kind in CLASSES.items()}
    assert drawn == actual


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_every_error_is_one_and_says_in_a_sentence_what_it_is(kind):
    assert issubclass(kind, OctavoError)
    assert kind.__doc__.splitlines()[0].endswith(".")
    assert 400 <= kind.status < 600


def test_a_wrong_parameter_is_named_with_its_value_and_what_is_allowed():
    error = InvalidParameterError("top_p", 7, "a number above 0 and at most 1")
    assert str(error) == "top_p must be a number above 0 and at most 1, not 7."
    assert (error.field, error.status, error.code) == ("top_p", 400, "invalid_value")


def test_nearest_names_what_may_have_been_meant():
    known = ["temperature", "top_p", "top_k"]
    assert nearest("temprature", known) == " Did you mean 'temperature'?"
    assert nearest("top", known) == " Did you mean 'top_p' or 'top_k'?"
    assert nearest("zzz", known) == nearest("a", []) == ""


def test_a_long_value_is_cut_with_an_ellipsis():
    assert shorten("abc") == "'abc'"
    cut = shorten("x" * 1000)
    assert len(cut) == 80
    assert cut.endswith("…")
    assert shorten([1, 2], limit=3) == "[1…"
