"""The Python snippets of the pages run, and print what the pages say they print.

What a model answers differs between instruction sets, so those snippets need only print something.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

from octavo.weights.fetch import cached_path

DOCS = Path(__file__).parent.parent.parent / "docs"
# A snippet, and the output that follows it directly, if any.
SNIPPET = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("page", ["tutorials/first-answer.md", "explanation/serving.md"])
def test_snippets_print_what_the_page_says(page: str) -> None:
    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull` does it")
    snippets = SNIPPET.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(snippets) >= 7
    names: dict[str, object] = {}
    for code, expected in snippets:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if "llm" not in code:
            assert not expected or printed.getvalue().rstrip() == expected.rstrip()
        elif expected:
            assert printed.getvalue().strip()
