"""API keys from a file, each with its scopes.

Decides who may do what. Knows no route. Invariant: keys are kept as digests, compared in constant
time, and never shown.
"""

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import AccessError, ForbiddenError, SettingError

SCOPES = ("inference", "read", "admin")
DEFAULT_SCOPES = frozenset({"inference", "read"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. key: digest of its key; None where the server has no keys."""

    key: bytes | None = None
    is_admin: bool = False

    def may_see(self, other: "Caller") -> bool:
        """Whether what happened to a request of `other` may be told."""
        return self.is_admin or self.key == other.key


# Where there are no keys, everybody is the same caller.
ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digest of each key to its scopes."""

    scopes: dict[bytes, frozenset[str]]

    def check(self, authorization: str | None, scope: str) -> Caller:
        """Return whose key it is.

        Raises AccessError for no or an unknown key, ForbiddenError for one without `scope`.
        """
        kind, _, key = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise AccessError("The server wants an API key: send `Authorization: Bearer KEY`.")
        digest = _digest(key.strip())
        granted: frozenset[str] | None = None
        for known, scopes in self.scopes.items():  # each is compared, whichever matches
            if hmac.compare_digest(known, digest):
                granted = scopes
        if granted is None:
            raise AccessError("The server does not know this API key.")
        if scope not in granted and "admin" not in granted:
            raise ForbiddenError(f"This API key does not have the scope {scope}.")
        return Caller(digest, "admin" in granted)


def read_keys(path: Path) -> ApiKeys:
    """Read a file of lines `KEY [SCOPE,...]`; # begins a comment. Raises SettingError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SettingError(f"api_key_file: cannot read {path}: {error}.") from None
    keys: dict[bytes, frozenset[str]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        unknown = set(words[1:]) - set(SCOPES)
        if unknown:
            raise SettingError(
                f"api_key_file: line {number} of {path} has an unknown scope. "
                f"The scopes are {', '.join(SCOPES)}."
            )
        keys[_digest(words[0])] = frozenset(words[1:]) or DEFAULT_SCOPES
    if not keys:
        raise SettingError(f"api_key_file: {path} holds no key.")
    return ApiKeys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
