"""The bare binding of csrc/: the compiled library, or the reason why there is none.

Decides nothing. `library` is None where the install found no compiler; then `why_missing` says so,
and engines run on the reference executor.
"""

from types import ModuleType

library: ModuleType | None = None
why_missing = ""

try:
    from octavo.native import _octavo  # type: ignore[attr-defined]

    library = _octavo
except ImportError as error:
    why_missing = f"the native library is not built ({error})"
