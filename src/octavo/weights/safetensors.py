"""Reads safetensors: one file, or a Hugging Face directory of one or several.

The header reader is our own because the safetensors library does not say where a tensor lies, so it
would copy, and cannot give NumPy a bfloat16; the tests hold the two to the same verdicts.
Decides what a sound header and a sound index are. It does not know config.json nor what names mean.
Invariant: the tensors of a file tile its bytes after the header: no hole, no overlap, no remainder.
(Format: github.com/huggingface/safetensors, README.)
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError, shorten
from octavo.weights.mapping import MappedTensors, StoredTensor, lookalike, map_file
from octavo.weights.source import TensorInfo, TensorType

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_DTYPES = {name: TensorType[name] for name in ("F32", "F16", "BF16")}
_SHARD_NAME = re.compile(r".*-[0-9]{5}-of-[0-9]{5}\.safetensors")


class SafetensorsDirectory(MappedTensors):
    """An open safetensors file or a directory of them (a `TensorSource`).

    `path` is what was asked for. Made by `open_safetensors`.
    """


def open_safetensors(path: Path | str) -> SafetensorsDirectory:
    """Open a directory with model.safetensors or its index, or a single .safetensors file.

    A shard named -0000k-of-0000n.safetensors opens the whole set, by the index beside it.
    Raises ModelNotFoundError if there is nothing to open, ModelFileError if a file is damaged or
    missing, and UnsupportedModelError for a dtype other than F32, F16 and BF16.
    """
    path = Path(path)
    if path.is_dir():
        weights, index = path / WEIGHTS_NAME, path / INDEX_NAME
        if weights.exists():
            return SafetensorsDirectory(path, _read_file(weights))
        if index.exists():
            return SafetensorsDirectory(path, _read_shards(index))
        raise ModelNotFoundError(
            f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}. Download one of them, or give "
            "the path of a .safetensors or .gguf file."
        )
    if path.exists() and _SHARD_NAME.fullmatch(path.name):
        return SafetensorsDirectory(path, _read_shards(path.with_name(INDEX_NAME)))
    return SafetensorsDirectory(path, _read_file(path))


# --- several files


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors that the index lists, each from the shard that it names."""
    files = _read_index(index)
    folder = index.parent
    names = sorted(set(files.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFileError(
            f"{folder} holds {len(names) - len(missing)} of the {len(names)} files of this model: "
            f"{shorten(missing[0])} is missing. Download it into the same folder."
        )
    shards = {name: _read_file(folder / name) for name in names}
    for tensor, file in files.items():
        if tensor not in shards[file]:
            raise ModelFileError(
                f"{index} says that tensor {shorten(tensor)} is in {file}, which does not have it. "
                "Download both again."
            )
    return {tensor: shards[file][tensor] for tensor, file in files.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of every tensor."""
    if not index.exists():
        raise ModelFileError(
            f"{index} is missing, which says what the model's files hold. Download it into the "
            "same folder."
        )
    buffer = map_file(index)
    if len(buffer) > MAX_HEADER_BYTES:
        raise _damaged(index, f"it has {len(buffer):,} bytes, over {MAX_HEADER_BYTES:,}")
    files = _parse_object(index, buffer[:]).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise _damaged(index, "it has no weight_map of tensor names and file names")
    for tensor, file in files.items():
        # A plain name only: an index must not reach out of its own folder.
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\0"):
            raise _damaged(index, f"tensor {shorten(tensor)} is in the file {shorten(file)}")
    return files


# --- one file


def _read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, in the order of its header."""
    buffer = map_file(path)
    start = _header_end(path, buffer)
    header = _parse_object(path, buffer[8:start])
    _check_notes(path, header.pop("__metadata__", None))
    placed = {name: _read_entry(path, name, entry) for name, entry in header.items()}
    _check_tiling(path, placed, len(buffer) - start)
    stored = np.frombuffer(buffer, np.uint8)
    return {
        name: StoredTensor(info, stored[start + begin : start + begin + info.num_bytes])
        for name, (info, begin) in placed.items()
    }


def _header_end(path: Path, buffer: mmap.mmap) -> int:
    """Return the position where the tensor data begins."""
    if len(buffer) < 8:
        raise _damaged(path, f"it has only {len(buffer)} bytes")
    length: int = struct.unpack_from("<Q", buffer)[0]
    if length > min(len(buffer) - 8, MAX_HEADER_BYTES) or buffer[8:9] != b"{":
        raise lookalike(path, buffer) or _damaged(
            path,
            f"its header should take {length:,} bytes and begin with '{{', but {len(buffer) - 8:,} "
            f"bytes follow (at most {MAX_HEADER_BYTES:,} are read) and begin with {buffer[8:9]!r}",
        )
    return 8 + length


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse a JSON object whose keys are unique at every level."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name occurs twice")
        "".join(entries).encode()  # a ValueError if \u escapes name half a surrogate pair
        return entries

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its {len(text):,} bytes of JSON cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise _damaged(path, "its JSON is not an object")
    return parsed


def _check_notes(path: Path, notes: object) -> None:
    if notes is not None and not (
        isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())
    ):
        raise _damaged(path, "__metadata__ should map names to strings")


def _read_entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int]:
    """Return a tensor's description and where it begins after the header."""
    what = f"tensor {shorten(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{what} should have a dtype, a shape and data_offsets")
    if not isinstance(entry["dtype"], str):
        raise _damaged(path, f"the dtype of {what} should be a string")
    if entry["dtype"] not in _DTYPES:
        raise UnsupportedModelError(
            f"{path}: {what} is stored as {shorten(entry['dtype'])}, which Octavo cannot read. "
            f"Use a checkpoint of {', '.join(_DTYPES)}."
        )
    dtype = _DTYPES[entry["dtype"]]
    shape = _sizes(path, entry["shape"], f"the shape of {what}")
    offsets = _sizes(path, entry["data_offsets"], f"the data_offsets of {what}")
    num_bytes = math.prod(shape) * dtype.block_bytes
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise _damaged(
            path,
            f"{what} of {dtype} and shape {shorten(shape)} should take {num_bytes:,} bytes, but "
            f"its data_offsets are {shorten(offsets)}",
        )
    return TensorInfo(name, shape, dtype, num_bytes), offsets[0]


def _sizes(path: Path, value: object, what: str) -> tuple[int, ...]:
    # 64 bits bound the numbers, so that their products stay short enough to compute and to print.
    if isinstance(value, list) and len(value) <= 64:
        sizes = tuple(size for size in value if type(size) is int and 0 <= size < 1 << 64)
        if len(sizes) == len(value):
            return sizes
    raise _damaged(path, f"{what} should be a short list of sizes, not {type(value).__name__}")


def _check_tiling(path: Path, placed: Mapping[str, tuple[TensorInfo, int]], size: int) -> None:
    """Check that the tensors cover the `size` bytes after the header once."""
    free = 0
    for info, begin in sorted(placed.values(), key=lambda entry: (entry[1], entry[0].num_bytes)):
        if begin != free:
            raise _damaged(
                path,
                f"tensor {shorten(info.name)} begins at byte {begin:,} after the header instead of "
                f"{free:,}, where the tensor before it ends",
            )
        free = begin + info.num_bytes
    if free != size:
        raise _damaged(
            path, f"its {len(placed):,} tensors take {free:,} bytes, but it has {size:,}"
        )


def _damaged(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {problem}. Download it again.")
