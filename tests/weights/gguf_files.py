"""Writes GGUF files for tests, sound or not, and remembers where each number of the header lies.

Independent of the reader under test: it says nothing about what is allowed.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

# Value types by number, as in ggml/docs/gguf.md.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL = range(8)
STRING, ARRAY, UINT64, INT64, FLOAT64 = range(8, 13)
CODES = dict(zip((*range(8), *range(10, 13)), "BbHhIif?Qqd", strict=True))

# Tensor types by number.
F32, F16, Q4_0, Q4_1 = range(4)
Q8_0, Q6_K, BF16 = 8, 14, 30


class Field(NamedTuple):
    """A number of the header: what it means, where it lies and how many bytes it takes."""

    kind: str
    position: int
    width: int


class Array(NamedTuple):
    """An array value; `count` overrides the number written before the elements."""

    kind: int
    elements: list
    count: int | None = None


class Pair(NamedTuple):
    key: str | bytes
    kind: int
    value: object


@dataclass(frozen=True)
class Tensor:
    """`dims` as in the file: the fastest-running first. `offset` None follows the one before."""

    name: str | bytes
    dims: tuple[int, ...]
    kind: int
    stored: bytes
    offset: int | None = None


class File(NamedTuple):
    content: bytes
    fields: list[Field]


class _Header:
    def __init__(self) -> None:
        self.content = bytearray()
        self.fields: list[Field] = []

    def number(self, kind: str, code: str, value: object) -> None:
        self.fields.append(Field(kind, len(self.content), struct.calcsize("<" + code)))
        self.content += struct.pack("<" + code, value)

    def string(self, text: str | bytes) -> None:
        encoded = text.encode() if isinstance(text, str) else text
        self.number("length", "Q", len(encoded))
        self.content += encoded

    def value(self, kind: int, value: object) -> None:
        match value:
            case Array(element_kind, elements, count):
                self.number("type", "I", element_kind)
                self.number("count", "Q", len(elements) if count is None else count)
                for element in elements:
                    if element_kind == STRING:
                        self.string(element)
                    else:
                        self.value(element_kind, element)
            case bytes():  # as it is
                self.content += value
            case str():
                self.string(value)
            case _:
                self.number("value", CODES[kind], value)


def build(
    pairs: list[Pair],
    tensors: list[Tensor],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> File:
    """Return the bytes of a file; `num_tensors` and `num_pairs` override the true counts."""
    header = _Header()
    header.content += magic
    header.number("version", "I", version)
    header.number("count", "Q", len(tensors) if num_tensors is None else num_tensors)
    header.number("count", "Q", len(pairs) if num_pairs is None else num_pairs)
    for pair in pairs:
        header.string(pair.key)
        header.number("type", "I", pair.kind)
        kind = "alignment" if pair.key == "general.alignment" else "value"
        if kind == "alignment" and isinstance(pair.value, int):
            header.number(kind, CODES[pair.kind], pair.value)
        else:
            header.value(pair.kind, pair.value)
    stored = bytearray()
    for tensor in tensors:
        header.string(tensor.name)
        header.number("dims", "I", len(tensor.dims))
        for dim in tensor.dims:
            header.number("dim", "Q", dim)
        header.number("tensor type", "I", tensor.kind)
        header.number("offset", "Q", len(stored) if tensor.offset is None else tensor.offset)
        stored += tensor.stored + bytes(-len(tensor.stored) % alignment)
    padding = bytes(-len(header.content) % alignment)
    return File(bytes(header.content + padding + stored), header.fields)


def small_model() -> tuple[list[Pair], list[Tensor]]:
    """Return the parts of a sound little model: every kind of value, several types of tensor."""
    pairs = [
        Pair("general.architecture", STRING, "llama"),
        Pair("general.alignment", UINT32, 32),
        Pair("llama.block_count", UINT32, 2),
        Pair("llama.rope.freq_base", FLOAT32, 10000.0),
        Pair("test.uint8", UINT8, 8),
        Pair("test.int8", INT8, -8),
        Pair("test.uint16", UINT16, 16),
        Pair("test.int16", INT16, -16),
        Pair("test.int32", INT32, -32),
        Pair("test.uint64", UINT64, 2**64 - 1),
        Pair("test.int64", INT64, -(2**63)),
        Pair("test.float64", FLOAT64, 0.1),
        Pair("test.bool", BOOL, True),
        Pair("test.bools", ARRAY, Array(BOOL, [True, False])),
        Pair("test.empty", ARRAY, Array(STRING, [])),
        Pair("tokenizer.ggml.model", STRING, "gpt2"),
        Pair("tokenizer.ggml.tokens", ARRAY, Array(STRING, ["<s>", "", "é", "token"])),
        Pair("tokenizer.ggml.scores", ARRAY, Array(FLOAT32, [0.0, -1.5, 2.0, 3.0])),
        Pair("tokenizer.ggml.token_type", ARRAY, Array(INT32, [3, 1, 1, 1])),
    ]
    tensors = [
        Tensor("token_embd.weight", (64, 4), Q8_0, bytes(range(68)) * 4),
        Tensor("blk.0.attn_q.weight", (32, 2), Q4_1, bytes(range(40))),
        Tensor("blk.0.attn_norm.weight", (5,), F32, struct.pack("<5f", 1, 2, 3, 4, 5)),
        Tensor("blk.1.attn_q.weight", (32, 2, 2), Q4_0, bytes(range(72))),
        Tensor("blk.1.ffn_up.weight", (256, 1), Q6_K, bytes(range(210))),
        Tensor("output_norm.weight", (3, 2), BF16, bytes(range(12))),
    ]
    return pairs, tensors
