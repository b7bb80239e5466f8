"""The bare binding of csrc/: the compiled library, or the reason why there is none.

Decides nothing. `library` is None where the install found no compiler; then `why_missing` says so,
and engines run on the reference executor.
"""

from importlib import import_module
from types import ModuleType

library: ModuleType | None = None
why_missing = ""

try:
    library = import_module("octavo.native._octavo")
except ModuleNotFoundError:
    why_missing = "the native library was not built when Octavo was installed (no C++ compiler?)"
except ImportError as error:
    why_missing = f"the native library does not load ({error})"
