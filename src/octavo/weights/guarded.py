"""Keeps strings from a user apart from the token texts that only a template may write.

Decides where a mark must be put into a user's string so that, wherever a template writes it, no
guarded token's text is found that has one of the user's characters in it. `Tokenizer.encode` looks
for tokens first and takes the marks out afterwards. It does not know templates or tokens' ids.

Invariant: removing the mark from a protected string gives the string back.
"""

import re
from collections.abc import Set
from functools import cached_property


class GuardedTexts:
    """The texts of a model's guarded tokens, indexed for finding them and parts of them."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts

    def protect(self, text: str, mark: str, words: Set[str] = frozenset()) -> str:
        """Return `text` with the character `mark` wherever it could make up a guarded token.

        `words` are names that the template compares with, such as "object": equal strings stay as
        they are. They are part of some tokens' texts, and templates do not build tokens from them.
        """
        if not self.texts or (text in words and text.isidentifier()):
            return text
        core = text.strip()  # as a template may write it
        start = len(text) - len(text.lstrip())
        broken = self._first.sub(lambda found: found[0] + self._broken(core, found, mark), core)
        if any(core[:n] in self._endings for n in self._sizes(core)) or self._is_inside(core):
            broken = mark + broken
        if any(core[-n:] in self._beginnings for n in self._sizes(core)):
            broken += mark
        return text[:start] + broken + text[start + len(core) :]

    def _is_inside(self, text: str) -> bool:
        return 0 < len(text) < self._longest and text in self._joined

    def _broken(self, text: str, found: re.Match[str], mark: str) -> str:
        start = found.start()
        return mark if any(text[start : start + n] in self._set for n in self._lengths) else ""

    def _sizes(self, text: str) -> range:
        return range(1, min(len(text) + 1, self._longest))

    @cached_property
    def _set(self) -> frozenset[str]:
        return frozenset(self.texts)

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted(set(map(len, self.texts)))

    @cached_property
    def _longest(self) -> int:
        return self._lengths[-1]

    @cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(f"[{re.escape(''.join(sorted({text[0] for text in self.texts})))}]")

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self.texts for n in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self.texts for n in range(1, len(text)))

    @cached_property
    def _joined(self) -> str:
        return "\n".join(self.texts)
