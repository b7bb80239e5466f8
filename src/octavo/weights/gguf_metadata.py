"""The metadata of a GGUF header: a bounds-checked cursor over it, and its key-value pairs.

Decides what a sound key or value is. It does not know what the keys mean, except a few whose wrong
type would hurt whoever reads them next; nor anything about tensors (`gguf`).
Large arrays such as the vocabulary are located when the file is opened, and decoded when asked for.
Invariant: nothing is allocated or handed out for a count or length before it was compared with the
bytes that are really there. (Format: ggml/docs/gguf.md.)
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from octavo.errors import ModelFileError, shorten

Scalar = str | int | float | bool
Elements = list[str] | list[int] | list[float] | list[bool]
MetadataValue = Scalar | Elements

# Forty times the header of a model with 262,144 tokens. It bounds the time and the memory that any
# header can cost, since every count is checked against the bytes left.
MAX_HEADER_BYTES = 1 << 28
MAX_NAME_BYTES = (1 << 16) - 1  # "at most 2^16 - 1 bytes long" (gguf.md, on keys)
MIN_PAIR_BYTES = 8 + 4 + 1  # the length of an empty key, a value type, one byte of value


class ValueType(IntEnum):
    """The type of a metadata value, numbered as in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Codes of `struct` and NumPy alike; BOOL is read as a byte, to see whether it is 0 or 1.
_CODES = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<B",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}

# Keys that every reader takes for granted.
_STRINGS = (
    "general.architecture",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)
_ARRAYS = {
    "tokenizer.ggml.tokens": ValueType.STRING,
    "tokenizer.ggml.merges": ValueType.STRING,
    "tokenizer.ggml.scores": ValueType.FLOAT32,
    "tokenizer.ggml.token_type": ValueType.INT32,
}
_ONE_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


class Metadata(Mapping[str, MetadataValue]):
    """The key-value pairs of a header, in order, as plain Python values.

    An array becomes a list each time that it is asked for, and is not kept: a vocabulary is large.
    Raises ModelFileError where such an array holds an invalid string or boolean.
    """

    def __init__(self, path: Path, entries: "dict[str, Scalar | LazyArray]") -> None:
        self.path = path
        self._entries = entries

    def __getitem__(self, key: str) -> MetadataValue:
        entry = self._entries[key]
        return entry.decode() if isinstance(entry, LazyArray) else entry

    def __contains__(self, key: object) -> bool:
        return key in self._entries  # without decoding it, as Mapping's own would

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def integer(self, key: str, default: int) -> int:
        """Return the value of `key`, or `default` where it is absent.

        Raises ModelFileError if the value is anything but an integer.
        """
        value = self._entries.get(key, default)
        if type(value) is not int:  # a bool is no number here
            raise _wrong_type(self.path, key, "an integer")
        return value


@dataclass(frozen=True, slots=True)
class LazyArray:
    """Where an array of metadata lies in its file; every element is known to be within it."""

    path: Path
    buffer: mmap.mmap
    key: str
    kind: ValueType
    count: int
    begin: int
    end: int

    def decode(self) -> Elements:
        """Return the elements as a list of plain Python values."""
        if self.kind is ValueType.STRING:
            return self._strings()
        numbers = np.frombuffer(self.buffer, _CODES[self.kind], self.count, self.begin)
        if self.kind is ValueType.BOOL:
            if (numbers > 1).any():
                raise _damaged(self.path, f"{shorten(self.key)} has booleans other than 0 and 1")
            numbers = numbers.astype(bool)
        elements: Elements = numbers.tolist()
        return elements

    def _strings(self) -> list[str]:
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        content, position = self.buffer[self.begin : self.end], 0
        for index in range(self.count):
            begin = position + 8
            position = begin + length_at(content, position)[0]
            try:
                strings.append(content[begin:position].decode())
            except UnicodeDecodeError:
                raise _damaged(
                    self.path, f"string {index:,} of {shorten(self.key)} is not valid UTF-8"
                ) from None
        return strings


class Cursor:
    """A position in a mapped header, which it cannot leave."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.end = min(len(buffer), MAX_HEADER_BYTES)

    def damaged(self, problem: str) -> ModelFileError:
        """Return the error that says what is wrong with the file."""
        return _damaged(self.path, problem)

    def require(self, num_bytes: int, what: str) -> None:
        """Raise unless the header has `num_bytes` more bytes for `what`."""
        if num_bytes > self.end - self.position:
            whole = "file" if self.end == len(self.buffer) else "largest header Octavo reads"
            raise self.damaged(
                f"{what} needs {num_bytes:,} bytes from byte {self.position:,} on, but the {whole} "
                f"ends at {self.end:,}"
            )

    def skip(self, num_bytes: int, what: str) -> int:
        """Pass over `num_bytes` and return the position where they begin."""
        self.require(num_bytes, what)
        begin = self.position
        self.position += num_bytes
        return begin

    def number(self, code: str, what: str) -> int | float:
        """Read one number with a format code of `struct`."""
        begin = self.skip(struct.calcsize(code), what)
        value: int | float = struct.unpack_from(code, self.buffer, begin)[0]
        return value

    def uint32(self, what: str) -> int:
        """Read an unsigned number of 32 bits."""
        return int(self.number("<I", what))

    def uint64(self, what: str) -> int:
        """Read an unsigned number of 64 bits."""
        return int(self.number("<Q", what))

    def count(self, what: str, each: int) -> int:
        """Read a 64-bit count of things that take at least `each` bytes, all of them present."""
        count = self.uint64(f"the number of {what}")
        self.require(count * each, f"the list of {count:,} {what}")
        return count

    def string(self, what: str) -> str:
        """Read a string of any length."""
        begin = self.skip(self.count(f"bytes of {what}", 1), what)
        try:
            return self.buffer[begin : self.position].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {begin:,} is not valid UTF-8") from None

    def name(self, what: str) -> str:
        """Read a string that names something: neither empty nor endless."""
        begin = self.position
        name = self.string(what)
        num_bytes = self.position - begin - 8
        if not 0 < num_bytes <= MAX_NAME_BYTES:
            raise self.damaged(
                f"{what} at byte {begin:,} is {num_bytes:,} bytes long, not 1 to {MAX_NAME_BYTES:,}"
            )
        return name


def parse_metadata(cursor: Cursor, num_pairs: int) -> Metadata:
    """Read `num_pairs` key-value pairs from where the cursor stands.

    Raises ModelFileError for anything that is not what it should be.
    """
    entries: dict[str, Scalar | LazyArray] = {}
    for index in range(num_pairs):
        key = cursor.name(f"metadata key {index:,}")
        if key in entries:
            raise cursor.damaged(f"metadata key {shorten(key)} occurs twice")
        entries[key] = _read_value(cursor, key)
    _check_known_keys(cursor.path, entries)
    return Metadata(cursor.path, entries)


def _read_value(cursor: Cursor, key: str) -> Scalar | LazyArray:
    what = f"the value of {shorten(key)}"
    kind = _read_kind(cursor, what)
    if kind is ValueType.ARRAY:
        return _locate_array(cursor, key)
    if kind is ValueType.STRING:
        return cursor.string(what)
    value = cursor.number(_CODES[kind], what)
    if kind is not ValueType.BOOL:
        return value
    if value > 1:
        raise cursor.damaged(f"{what} is a boolean of {value}, which should be 0 or 1")
    return bool(value)


def _read_kind(cursor: Cursor, what: str) -> ValueType:
    number = cursor.uint32(f"the type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.damaged(f"{what} has the unknown type {number:,}") from None


def _locate_array(cursor: Cursor, key: str) -> LazyArray:
    """Pass over an array, and return where it lies."""
    what = f"the array {shorten(key)}"
    kind = _read_kind(cursor, what)
    if kind is ValueType.ARRAY:
        raise cursor.damaged(f"{what} is an array of arrays, which no model needs")
    size = 8 if kind is ValueType.STRING else struct.calcsize(_CODES[kind])
    count = cursor.count(f"elements of {what}", size)
    begin = cursor.position
    if kind is ValueType.STRING:
        _skip_strings(cursor, count, what)
    else:
        cursor.skip(count * size, what)
    return LazyArray(cursor.path, cursor.buffer, key, kind, count, begin, cursor.position)


def _skip_strings(cursor: Cursor, count: int, what: str) -> None:
    """Pass over `count` strings; plain variables, because a vocabulary has 100,000s of them."""
    length_at = struct.Struct("<Q").unpack_from
    buffer, position, last = cursor.buffer, cursor.position, cursor.end - 8
    for index in range(count):
        if position > last:
            raise cursor.damaged(f"{what} is cut off after {index:,} of {count:,} strings")
        position += 8 + length_at(buffer, position)[0]
    if position > cursor.end:
        raise cursor.damaged(f"the last string of {what} goes beyond byte {cursor.end:,}")
    cursor.position = position


def _check_known_keys(path: Path, entries: Mapping[str, Scalar | LazyArray]) -> None:
    for key in _STRINGS:
        if not isinstance(entries.get(key, ""), str):
            raise _wrong_type(path, key, "a string")
    counts = {}
    for key, kind in _ARRAYS.items():
        if (array := entries.get(key)) is None:
            continue
        if not isinstance(array, LazyArray) or array.kind is not kind:
            raise _wrong_type(path, key, f"an array of {kind.name}")
        counts[key] = array.count
    num_tokens = counts.get("tokenizer.ggml.tokens")
    for key in _ONE_PER_TOKEN:
        if num_tokens is not None and counts.get(key, num_tokens) != num_tokens:
            raise _damaged(path, f"it has {num_tokens:,} tokens, but {counts[key]:,} of {key}")


def _wrong_type(path: Path, key: str, expected: str) -> ModelFileError:
    return _damaged(path, f"the value of {shorten(key)} should be {expected}")


def _damaged(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {problem}. Download it again.")
