"""Installing an engine into a folder of its own, outside of the repository, once.

Decides when an installation is still good: when the recipe that made it is word for word the one
that would make it now. Invariant: nothing outside the folder is changed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# A compiler has the longest of the steps: llama-server takes 20 minutes of two cores.
_STEP_SECONDS = 3600


class UnavailableError(Exception):
    """An engine or a model file of it cannot be had here; the message is the reason."""


def once(folder: Path, recipe: str, build: Callable[[], None]) -> None:
    """Run `build` in an emptied `folder`, unless this recipe did already.

    Raises UnavailableError where it fails.
    """
    stamp = folder / ".recipe"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build()
    stamp.write_text(recipe)


def run_step(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> None:
    """Run one command of an installation; its output goes to the end of `log`.

    Raises UnavailableError with the last line that it printed if it fails.
    """
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                timeout=_STEP_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{Path(command[0]).name}: {error} (see {log})") from None
    if done.returncode:
        raise UnavailableError(f"{Path(command[0]).name} failed: {last_line(log)} (see {log})")


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


def make_venv(folder: Path, packages: Sequence[str], log: Path) -> Path:
    """Make an environment with `packages` in `folder`; return its folder of programs."""
    run_step([sys.executable, "-m", "venv", folder / ".venv"], log)
    programs = folder / ".venv" / "bin"
    run_step([programs / "pip", "install", "--quiet", *packages], log)
    return programs


def cpu_flags() -> str:
    """Return what this processor can do: a program built for it may run on no other."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")
