"""Typed access to the loosely typed numbers of a model file.

Decides how a missing, mistyped or impossible field is reported. Knows no field by name.
Invariant: whatever a method returns has the type and lies in the range that the caller asked for.
"""

from collections.abc import Mapping
from typing import TypeVar

from octavo.errors import ModelFileError, UnsupportedModelError, shorten

T = TypeVar("T")


class Fields:
    """Typed access to `config.json` or GGUF metadata; absent and null are the same.

    Every method raises `ModelFileError` naming the field, its value and what it may be. `prefix` is
    put before each name ("llama." in GGUF).
    """

    def __init__(self, values: Mapping[str, object], architecture: str, prefix: str = "") -> None:
        self.values = values
        self.architecture = architecture
        self.prefix = prefix

    def get(self, name: str) -> object | None:
        """Return the value as it stands, or None."""
        return self.values.get(self.prefix + name)

    def integer(self, name: str, high: int, default: int | None = None, low: int = 1) -> int:
        """Read an integer from `low` to `high`."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low:,} to {high:,}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number above 0 and at most 1e12."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e12:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def mapping(self, name: str) -> Mapping[str, object]:
        """Read an object; an absent one is empty."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value or {}

    def choice(self, name: str, known: Mapping[str, T], default: str) -> T:
        """Read one of the known words; raises `UnsupportedModelError` for any other."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(name, f"one of {', '.join(known)}")
        if value not in known:
            self.refuse(name, *known)
        return known[value]

    def within(self, name: str) -> "Fields":
        """Read an object's own fields; errors call them NAME.FIELD."""
        inner = {f"{name}.{key}": value for key, value in self.mapping(name).items()}
        return Fields(inner, self.architecture, f"{name}.")

    def refuse(self, name: str, *neutral: object) -> None:
        """Raise `UnsupportedModelError` if the field is there with another than a neutral value."""
        value = self.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedModelError(
                f"{self.prefix}{name} is {shorten(value)}, which Octavo does not support for "
                f"{self.architecture}."
            )

    def wrong(self, name: str, allowed: str) -> ModelFileError:
        """Return the error for a value that cannot be."""
        value = self.get(name)
        return ModelFileError(
            f"{self.prefix}{name} is {'missing' if value is None else shorten(value)}; the model's "
            f"configuration needs {allowed}."
        )
