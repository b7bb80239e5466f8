"""What stands beside every measured figure: machine, versions, commit.

Decides what must be known to compare two figures. Reads files of the kernel and of the checkout,
and measures nothing. Invariant: nothing here fails; what cannot be told is left out.
"""

import platform
import subprocess
from pathlib import Path

import numpy as np

from octavo.engine.machine import available_cpus, cpu_model

_PACKAGE = Path(__file__).parent.parent


def describe_machine(package: Path = _PACKAGE) -> dict[str, str | int]:
    """Return CPU model, CPUs that may be used, versions, and the commit if in a checkout."""
    found: dict[str, str | int] = {
        "cpu": cpu_model(),
        "cpus": available_cpus(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    commit = _commit(package)
    return {**found, "commit": commit} if commit else found


def _commit(package: Path) -> str:
    """Return the short commit id, with + if files differ from it; "" outside of a checkout.

    A package that is only installed below somebody's repository is not tracked by it.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        return _git(package, "describe", "--always", "--dirty=+", "--exclude=*")
    return ""


def _git(folder: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
