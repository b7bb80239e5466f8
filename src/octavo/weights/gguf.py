"""Reads the tensors of GGUF files, versions 2 and 3, little-endian, whole or split into parts.

Decides which files belong together and where each tensor lies. Of the metadata it knows only what
says how to read the file itself, and the number of blocks, which must not lead a reader astray.
Invariant: the tensors of a file tile the bytes after its header, with nothing but the padding of
the alignment between them; so a wrong count, size or offset cannot go unnoticed.
(Format: ggml/docs/gguf.md.)
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError, shorten
from octavo.weights.gguf_metadata import MIN_PAIR_BYTES, Cursor, Metadata, parse_metadata
from octavo.weights.mapping import MappedTensors, StoredTensor, lookalike, map_file
from octavo.weights.source import TensorInfo, TensorType

MAX_DIMS = 4
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # the length of an empty name, no dimensions, type, offset
DEFAULT_ALIGNMENT = 32
# More transformer blocks than any model has: a file may claim as many whatever tensors it holds.
HARMLESS_BLOCK_COUNT = 1024

_TENSOR_TYPES = {
    0: TensorType.F32,
    1: TensorType.F16,
    2: TensorType.Q4_0,
    3: TensorType.Q4_1,
    6: TensorType.Q5_0,
    7: TensorType.Q5_1,
    8: TensorType.Q8_0,
    12: TensorType.Q4_K,
    13: TensorType.Q5_K,
    14: TensorType.Q6_K,
    30: TensorType.BF16,
}

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.gguf")


class GGUFFile(MappedTensors):
    """An open GGUF model, of one file or several parts (a `TensorSource`).

    `path` is the file, or the first part. `metadata` is that file's, and stays readable after
    `close`. Made by `open_gguf`.
    """

    def __init__(self, metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(metadata.path, tensors)
        self.metadata = metadata


def open_gguf(path: Path | str) -> GGUFFile:
    """Open a GGUF file; any part of a split model, named -0000k-of-0000n.gguf, opens all of it.

    Raises ModelNotFoundError if there is no such file, ModelFileError if it is damaged or a part is
    missing, and UnsupportedModelError for a version or a tensor type that Octavo cannot read.
    """
    path = Path(path)
    paths = _part_paths(path)
    parts = [_read_part(part_path) for part_path in paths]
    for number, part in enumerate(parts):
        _check_part_number(part, number, len(parts))
    tensors = _join(parts)
    metadata = parts[0].metadata
    _check_block_count(metadata, len(tensors))
    return GGUFFile(metadata, tensors)


# --- split models


class _Part(NamedTuple):
    path: Path
    metadata: Metadata
    tensors: dict[str, StoredTensor]


def _part_paths(path: Path) -> list[Path]:
    """Return every file of the set that `path` belongs to, by its name, first part first."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    number, total = int(match["number"]), int(match["total"])
    if not 1 <= number <= total:
        raise ModelFileError(f"{path} calls itself part {number} of {total}. Restore its name.")
    paths = [
        path.with_name(f"{match['stem']}-{part:05d}-of-{total:05d}.gguf")
        for part in range(1, total + 1)
    ]
    if not path.exists():
        raise ModelNotFoundError(f"There is no file {path}. Check the path.")
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ModelFileError(
            f"{path.parent} holds {total - len(missing)} of the {total} parts of this model: "
            f"{missing[0]} is missing. Download it into the same folder."
        )
    return paths


def _check_part_number(part: _Part, number: int, total: int) -> None:
    """Compare a part's own account of itself with its file name."""
    claimed_number = part.metadata.integer("split.no", 0)
    claimed_total = part.metadata.integer("split.count", 1)
    if (claimed_number, claimed_total) == (number, total):
        return
    if total == 1:
        raise ModelFileError(
            f"{part.path} is part {claimed_number + 1:,} of a model split into {claimed_total:,} "
            "(split.no, split.count). Give the parts their names back: NAME-0000k-of-0000n.gguf."
        )
    raise ModelFileError(
        f"{part.path} is named as part {number + 1} of {total}, but calls itself part "
        f"{claimed_number + 1:,} of {claimed_total:,} (split.no, split.count). Download it again."
    )


def _join(parts: list[_Part]) -> dict[str, StoredTensor]:
    """Return the tensors of all parts as one mapping."""
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(
                    f"{part.path} repeats tensor {shorten(name)} of an earlier part. "
                    "Download the parts again."
                )
            tensors[name] = tensor
    first = parts[0]
    promised = first.metadata.integer("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ModelFileError(
            f"{first.path} promises {promised:,} tensors (split.tensors.count), but its "
            f"{len(parts):,} parts hold {len(tensors):,}. Download the parts again."
        )
    return tensors


def _check_block_count(metadata: Metadata, num_tensors: int) -> None:
    """Refuse more transformer blocks than the tensors could make up."""
    key = f"{metadata.get('general.architecture')}.block_count"
    count = metadata.integer(key, 0)
    if not 0 <= count <= max(num_tensors, HARMLESS_BLOCK_COUNT):
        raise ModelFileError(
            f"{metadata.path} is damaged: {shorten(key)} is {count:,}, but the model has "
            f"{num_tensors:,} tensors. Download it again."
        )


# --- one file


class _TensorEntry(NamedTuple):
    info: TensorInfo
    offset: int  # bytes from the beginning of the tensor data


def _read_part(path: Path) -> _Part:
    """Read and check one file on its own."""
    cursor = Cursor(path, map_file(path))
    _check_version(cursor)
    num_tensors = cursor.uint64("the number of tensors")
    num_pairs = cursor.uint64("the number of metadata pairs")
    cursor.require(
        num_tensors * MIN_TENSOR_BYTES + num_pairs * MIN_PAIR_BYTES,
        f"a header of {num_tensors:,} tensors and {num_pairs:,} metadata pairs",
    )
    metadata = parse_metadata(cursor, num_pairs)
    entries = _read_tensor_entries(cursor, num_tensors)
    return _Part(path, metadata, _place_tensors(cursor, entries, _alignment(cursor, metadata)))


def _check_version(cursor: Cursor) -> None:
    path, head = cursor.path, cursor.buffer[:4]
    if head != b"GGUF":
        raise lookalike(path, cursor.buffer) or ModelFileError(
            f"{path} is not a GGUF file: it begins with {head!r} instead of b'GGUF'. "
            "Give the path of a GGUF file or download it again."
        )
    cursor.skip(4, "the magic number")
    version = cursor.uint32("the format version")
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        raise UnsupportedModelError(
            f"{path} is a big-endian GGUF file, and Octavo reads little-endian ones. "
            "Convert the model for this machine."
        )
    raise UnsupportedModelError(
        f"{path} is GGUF version {version:,}, and Octavo reads versions 2 and 3. "
        "Convert the model again with a current tool."
    )


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment:,}, which should be a power of two")
    return alignment


def _read_tensor_entries(cursor: Cursor, num_tensors: int) -> dict[str, _TensorEntry]:
    entries: dict[str, _TensorEntry] = {}
    for index in range(num_tensors):
        name = cursor.name(f"the name of tensor {index:,}")
        if name in entries:
            raise cursor.damaged(f"tensor {shorten(name)} occurs twice")
        entries[name] = _read_tensor_entry(cursor, name)
    return entries


def _read_tensor_entry(cursor: Cursor, name: str) -> _TensorEntry:
    what = f"tensor {shorten(name)}"
    num_dims = cursor.uint32(f"the dimensions of {what}")
    if num_dims > MAX_DIMS:
        raise cursor.damaged(f"{what} has {num_dims:,} dimensions, and at most {MAX_DIMS} exist")
    dims = [cursor.uint64(f"the dimensions of {what}") for _ in range(num_dims)]
    dtype = _tensor_type(cursor, what)
    offset = cursor.uint64(f"the offset of {what}")
    # GGUF names the fastest-running dimension first.
    shape = tuple(reversed(dims))
    num_elements, row = math.prod(shape), shape[-1] if shape else 1
    if not num_elements:
        raise cursor.damaged(f"{what} has a dimension of 0 in {shape}")
    if row % dtype.block_elements:
        raise cursor.damaged(
            f"{what} has rows of {row:,} values, not a multiple of the {dtype.block_elements} that "
            f"make a block of {dtype}"
        )
    num_bytes = num_elements // dtype.block_elements * dtype.block_bytes
    return _TensorEntry(TensorInfo(name, shape, dtype, num_bytes), offset)


def _tensor_type(cursor: Cursor, what: str) -> TensorType:
    number = cursor.uint32(f"the type of {what}")
    if number in _TENSOR_TYPES:
        return _TENSOR_TYPES[number]
    from gguf.constants import GGMLQuantizationType  # slow to import, and only needed here

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    raise UnsupportedModelError(
        f"{cursor.path}: {what} is stored as {known.get(number, 'an unknown type')} (type "
        f"{number:,}), which Octavo cannot read. Use a file of types "
        f"{', '.join(_TENSOR_TYPES.values())}."
    )


def _place_tensors(
    cursor: Cursor, entries: Mapping[str, _TensorEntry], alignment: int
) -> dict[str, StoredTensor]:
    """Return each tensor with its bytes, having checked that they tile the rest of the file.

    GGML reads no files with gaps either.
    """
    start, size = _padded(cursor.position, alignment), len(cursor.buffer)
    free = 0
    for info, offset in sorted(entries.values(), key=lambda entry: entry.offset):
        what = f"tensor {shorten(info.name)}"
        if offset != free:
            raise cursor.damaged(
                f"{what} begins at byte {offset:,} of the tensor data instead of {free:,}, where "
                f"the tensor before it ends (alignment {alignment:,})"
            )
        end = start + offset + info.num_bytes
        if end > size:
            raise cursor.damaged(f"{what} ends at byte {end:,}, but the file at {size:,}")
        free = _padded(offset + info.num_bytes, alignment)
    if size > start + free:
        raise cursor.damaged(
            f"{size - start - free:,} bytes at its end belong to none of its {len(entries):,} "
            "tensors"
        )
    stored = np.frombuffer(cursor.buffer, np.uint8)
    return {
        name: StoredTensor(info, stored[start + offset : start + offset + info.num_bytes])
        for name, (info, offset) in entries.items()
    }


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
