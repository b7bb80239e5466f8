"""Files that are damaged, or made to hurt: each is refused in one line, before memory is spent."""

import os
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf.quants  # noqa: F401  imported ahead, lest its cost be counted as a file's
import pytest

import tests.weights.gguf_files as files
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.weights.gguf import open_gguf
from tests.weights.gguf_files import ARRAY, F32, STRING, UINT32, Array, Field, Pair, Tensor

SEED = 20_250_611
NUM_MUTATIONS = 1000
MEMORY_LIMIT = 1 << 18  # bytes; the sound file has 1,824, its values take 2,860


def file_of(*pairs: Pair, tensors: list[Tensor] | None = None, **options) -> bytes:
    sound = [Tensor("a", (8,), F32, bytes(32))]
    return files.build(list(pairs), sound if tensors is None else tensors, **options).content


def tensor_of(dims: tuple[int, ...], kind: int = F32, offset: int | None = None) -> bytes:
    return file_of(tensors=[Tensor("a", dims, kind, bytes(64), offset)])


def sound_file() -> bytes:
    return files.build(*files.small_model()).content


def pair_then(kind: int, value: bytes) -> bytes:
    """A pair whose value is written as these bytes."""
    return file_of(Pair("key", kind, value))


def packed(code: str, *numbers: int) -> bytes:
    return struct.pack("<" + code, *numbers)


TOKENS = Pair("tokenizer.ggml.tokens", ARRAY, Array(STRING, ["a", "b"]))
LLAMA = Pair("general.architecture", STRING, "llama")

# What is wrong, the file, and words that its error must have.
NOT_GGUF = {
    "empty": (b"", "is empty"),
    "web page": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page"),
    "web page without doctype": (b"\xef\xbb\xbf<HTML>" + b" " * 5000, "is a web page"),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "git lfs pull",
    ),
    "zip": (b"PK\x03\x04" + bytes(100), "PyTorch"),
    "old ggml": (b"tjgg" + bytes(100), "before GGUF"),
    "noise": (bytes(range(200)), r"begins with b'\x00\x01\x02\x03'"),
    "newlines": (b"\n\n\n\n", r"begins with b'\n\n\n\n'"),
    "one byte": (b"G", "begins with b'G'"),
    "only magic": (b"GGUF", "format version needs 4 bytes"),
    "magic and version": (b"GGUF" + packed("I", 3), "number of tensors needs 8 bytes"),
}
COUNTS = {
    "2^60 tensors": (file_of(num_tensors=2**60), "a header of 1,152,921,504,606,846,976 tensors"),
    "2^60 pairs": (file_of(num_pairs=2**60), "1,152,921,504,606,846,976 metadata pairs"),
    "2^64 - 1 of both": (file_of(num_tensors=2**64 - 1, num_pairs=2**64 - 1), "needs"),
    "one tensor too few": (
        file_of(tensors=[Tensor(n, (8,), F32, bytes(32)) for n in "ab"], num_tensors=1),
        "belong to none of its 1 tensors",
    ),
    "one tensor too many": (file_of(num_tensors=2), "name of tensor 1"),
    "one pair too few": (file_of(LLAMA, num_pairs=0), "is damaged"),
    "one pair too many": (file_of(num_pairs=1), "is damaged"),
}
METADATA = {
    "key of 2^60 bytes": (
        files.build([], [], num_pairs=1).content[:24] + packed("Q", 2**60) + bytes(40),
        "list of 1,152,921,504,606,846,976 bytes of metadata key 0",
    ),
    "key of 70,000 bytes": (file_of(Pair("k" * 70_000, UINT32, 1)), "is 70,000 bytes long"),
    "empty key": (file_of(Pair("", UINT32, 1)), "is 0 bytes long"),
    "key not UTF-8": (file_of(Pair(b"\xff\xfe", UINT32, 1)), "key 0 at byte 32 is not valid UTF-8"),
    "string not UTF-8": (pair_then(STRING, packed("Q", 1) + b"\xff"), "is not valid UTF-8"),
    "same key twice": (file_of(LLAMA, LLAMA), "'general.architecture' occurs twice"),
    "unknown value type": (pair_then(13, b"\0"), "unknown type 13"),
    "boolean of 2": (pair_then(files.BOOL, b"\2"), "boolean of 2"),
    "string of 2^60 bytes": (pair_then(STRING, packed("Q", 2**60)), "list of 1,152,921,504,606"),
    "array of 2^60 numbers": (pair_then(ARRAY, packed("IQ", UINT32, 2**60)), "1,152,921,504,606"),
    "array of 2^62 numbers": (pair_then(ARRAY, packed("IQ", UINT32, 2**62)), "4,611,686,018,427"),
    "array of 2^60 strings": (pair_then(ARRAY, packed("IQ", STRING, 2**60)), "1,152,921,504,606"),
    "string in array of 2^64 - 1 bytes": (
        pair_then(ARRAY, packed("IQQQ", STRING, 2, 2**64 - 1, 0)),
        "cut off after 1 of 2 strings",
    ),
    "last string in array too long": (
        pair_then(ARRAY, packed("IQQ", STRING, 1, 1000)),
        "goes beyond byte",
    ),
    "array of arrays": (
        pair_then(ARRAY, packed("IQ", ARRAY, 1) * 50),
        "is an array of arrays",
    ),
    "array of unknown type": (pair_then(ARRAY, packed("IQ", 77, 1)), "unknown type 77"),
    "architecture a number": (file_of(Pair("general.architecture", UINT32, 1)), "be a string"),
    "architecture an array": (
        file_of(Pair("general.architecture", ARRAY, Array(STRING, ["llama"]))),
        "'general.architecture' should be a string",
    ),
    "tokens of numbers": (
        file_of(Pair("tokenizer.ggml.tokens", ARRAY, Array(UINT32, [1, 2]))),
        "'tokenizer.ggml.tokens' should be an array of STRING",
    ),
    "tokens one string": (file_of(Pair("tokenizer.ggml.tokens", STRING, "a")), "array of STRING"),
    "token types of floats": (
        file_of(Pair("tokenizer.ggml.token_type", ARRAY, Array(files.FLOAT32, [1.0]))),
        "should be an array of INT32",
    ),
    "fewer scores than tokens": (
        file_of(TOKENS, Pair("tokenizer.ggml.scores", ARRAY, Array(files.FLOAT32, [1.0]))),
        "has 2 tokens, but 1 of tokenizer.ggml.scores",
    ),
    "block count huge": (
        file_of(LLAMA, Pair("llama.block_count", UINT32, 2**32 - 1)),
        "'llama.block_count' is 4,294,967,295, but the model has 1 tensors",
    ),
    "block count negative": (
        file_of(LLAMA, Pair("llama.block_count", files.INT32, -1)),
        "'llama.block_count' is -1",
    ),
    "block count a string": (
        file_of(LLAMA, Pair("llama.block_count", STRING, "30")),
        "'llama.block_count' should be an integer",
    ),
    "alignment 0": (file_of(Pair("general.alignment", UINT32, 0)), "general.alignment is 0"),
    "alignment 24": (file_of(Pair("general.alignment", UINT32, 24)), "a power of two"),
    "alignment 2^31": (file_of(Pair("general.alignment", UINT32, 2**31)), "ends at byte"),
    "alignment a string": (file_of(Pair("general.alignment", STRING, "32")), "be an integer"),
    "alignment a boolean": (file_of(Pair("general.alignment", files.BOOL, True)), "be an integer"),
    "split count an array": (
        file_of(Pair("split.count", ARRAY, Array(UINT32, [1] * 1000))),
        "'split.count' should be an integer",
    ),
}
TENSORS = {
    "same name twice": (file_of(tensors=[Tensor("a", (8,), F32, bytes(32))] * 2), "occurs twice"),
    "empty name": (file_of(tensors=[Tensor("", (8,), F32, bytes(32))]), "is 0 bytes long"),
    "name not UTF-8": (file_of(tensors=[Tensor(b"\xc3", (8,), F32, bytes(32))]), "UTF-8"),
    "name with line breaks": (
        file_of(tensors=[Tensor("a\nb\r\u2028", (9,), F32, bytes(32))]),
        r"tensor 'a\nb\r\u2028' ends at byte",
    ),
    "dimension of 2^60": (tensor_of((2**60,)), "ends at byte 4,611,686,018,427,387,968"),
    "product of dimensions 2^64": (tensor_of((2**32, 2**32)), "ends at byte 73,786,976,294,838,"),
    "product of dimensions 2^256": (tensor_of((2**63,) * 4), "ends at byte"),
    "product of dimensions wraps to 8": (tensor_of((2**63 + 4, 2)), "ends at byte"),
    "dimension 0": (tensor_of((8, 0)), "a dimension of 0"),
    "five dimensions": (tensor_of((1, 1, 1, 1, 16)), "has 5 dimensions"),
    "2^32 - 1 dimensions": (
        files.build([], [], num_tensors=1).content[:24]
        + packed("Q", 1)
        + b"a"
        + packed("I", 2**32 - 1)
        + bytes(64),
        "has 4,294,967,295 dimensions",
    ),
    "row of half a block": (tensor_of((48,), files.Q8_0), "rows of 48 values, not a multiple of"),
    "scalar of a block type": (tensor_of((), files.Q8_0), "rows of 1 values"),
    "offset beyond the file": (tensor_of((16,), offset=2**40), "begins at byte 1,099,511,627,776"),
    "offset of 2^64 - 1": (tensor_of((16,), offset=2**64 - 1), "begins at byte 18,446,744,073"),
    "offset misaligned": (tensor_of((8,), offset=4), "begins at byte 4 of the tensor data"),
    "tensors overlap": (
        file_of(tensors=[Tensor(n, (16,), F32, bytes(64), 0) for n in "ab"]),
        "tensor 'b' begins at byte 0 of the tensor data instead of 64",
    ),
    "hole between tensors": (
        file_of(tensors=[Tensor("a", (8,), F32, bytes(64)), Tensor("b", (8,), F32, bytes(32))]),
        "tensor 'b' begins at byte 64 of the tensor data instead of 32",
    ),
    "bytes left over": (sound_file() + bytes(1), "1 bytes at its end belong to none"),
    "cut in the last tensor": (sound_file()[:-32], "tensor 'output_norm.weight' ends at byte"),
    "half of it": (sound_file()[: len(sound_file()) // 2], "is damaged"),
}
REFUSED = NOT_GGUF | COUNTS | METADATA | TENSORS


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    return str(caught.value)


@pytest.mark.case("S74")
@pytest.mark.case("S76")
@pytest.mark.parametrize("fault", REFUSED)
def test_fault_is_refused_in_one_line_with_little_memory(tmp_path, fault):
    content, words = REFUSED[fault]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message, memory = measured(lambda: refusal(path))
    assert words in message
    assert str(path) in message
    assert len(message.splitlines()) == 1
    assert message.endswith(".")
    assert memory < MEMORY_LIMIT


@pytest.mark.case("S76")
def test_damage_inside_an_array_is_found_when_it_is_read(tmp_path):
    tokens = Pair("tokenizer.ggml.tokens", ARRAY, Array(STRING, ["a", b"\xff"]))
    flags = Pair("flags", ARRAY, packed("IQ", files.BOOL, 2) + b"\1\2")
    (tmp_path / "model.gguf").write_bytes(file_of(tokens, flags))
    metadata = open_gguf(tmp_path / "model.gguf").metadata
    with pytest.raises(ModelFileError, match=r"string 1 of 'tokenizer\.ggml\.tokens' is not valid"):
        metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ModelFileError, match="'flags' has booleans other than 0 and 1"):
        metadata["flags"]


@pytest.mark.case("S76")
def test_header_without_end_is_refused_quickly(tmp_path):
    """A sparse file of 512 MiB that holds a metadata array of 2^25 empty strings."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(files.build([], [], num_pairs=1).content[:24])
        file.write(packed("Q", 1) + b"k" + packed("IIQ", ARRAY, STRING, 1 << 25))
        file.truncate(1 << 29)
    assert "largest header Octavo reads" in refusal(path)


@pytest.mark.case("S76")
def test_huge_array_within_the_file_costs_nothing_until_it_is_read(tmp_path):
    """A sparse file whose header has an array of 100 million bytes."""
    content = pair_then(ARRAY, packed("IQ", files.UINT8, 100_000_000))
    head = content[: content.index(packed("Q", 100_000_000)) + 8]
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(head.replace(packed("QQ", 1, 1), packed("QQ", 0, 1)))
        file.truncate(len(head) + 100_000_000)
    model, memory = measured(lambda: open_gguf(path))
    assert "key" in model.metadata
    assert memory < MEMORY_LIMIT


@pytest.mark.case("S76")
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file_is_refused(tmp_path, kind):
    path = tmp_path / "model.gguf"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert "is not a regular file" in refusal(path)


# --- mutations


def measured(act: Callable[[], object]) -> tuple:
    """Return what `act` returns, and the most memory in bytes that it held at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = act()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def read_everything(path: Path) -> str:
    """Open the file and read all that it offers."""
    with open_gguf(path) as model:
        for value in model.metadata.values():
            assert isinstance(value, str | int | float | bool | list)
        for name, info in model.tensors.items():
            assert model.raw(name).size == info.num_bytes
            assert model.float32(name).shape == info.shape
    return "opened"


def outcome_of(path: Path) -> str:
    """Return "opened" or the name of the error."""
    try:
        return read_everything(path)
    except (ModelFileError, UnsupportedModelError) as error:
        return type(error).__name__ if len(str(error).splitlines()) == 1 else "several lines"


def mutate_number(draw: random.Random, content: bytearray, fields: list[Field]) -> None:
    """Set a number of the header to something that might hurt."""
    kinds = sorted({field.kind for field in fields})
    kind = draw.choice(kinds)
    _, position, width = draw.choice([field for field in fields if field.kind == kind])
    old = int.from_bytes(content[position : position + width], "little")
    top = 1 << (8 * width)
    new = draw.choice(
        [
            *(0, 1, 2, 3, 5, 9, 12, 24, 64, 255),
            *(top - 1, top // 2, top // 2 - 1, 1 << 60, 1 << 40, 1 << 31),
            *(old + 1, old - 1, old * 2, old // 2, old + 32, old ^ 1 << draw.randrange(8 * width)),
            draw.randrange(top),
        ]
    )
    content[position : position + width] = (new % top).to_bytes(width, "little")


def flip_bytes(draw: random.Random, content: bytearray, fields: list[Field]) -> None:
    header_end = fields[-1].position + fields[-1].width
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(4, header_end)] = draw.randrange(256)


def splice(draw: random.Random, content: bytearray, fields: list[Field]) -> None:
    """Replace one stretch of the file by a copy of another, perhaps of another length."""
    begin, source = draw.randrange(4, len(content)), draw.randrange(len(content))
    taken = content[source : source + draw.randint(0, 64)]
    content[begin : begin + draw.choice([0, len(taken), draw.randint(0, 64)])] = taken


def truncate(draw: random.Random, content: bytearray, fields: list[Field]) -> None:
    del content[draw.randrange(len(content)) :]


def mutation(index: int) -> bytes:
    """Return the mutated file of this index: the same for the same SEED."""
    draw = random.Random(f"{SEED}/{index}")
    content, fields = files.build(*files.small_model())
    mutated = bytearray(content)
    mutate = draw.choices([mutate_number, flip_bytes, splice, truncate], [6, 2, 2, 1])[0]
    for _ in range(draw.choice([1, 1, 1, 2, 3]) if mutate is mutate_number else 1):
        mutate(draw, mutated, fields)
    return bytes(mutated)


@pytest.mark.case("S76")
def test_mutated_files_open_or_are_refused_with_little_memory(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(sound_file())
    assert read_everything(path) == "opened"  # also the first call of everything
    outcomes = Counter()
    highest = 0
    for index in range(NUM_MUTATIONS):
        path.write_bytes(mutation(index))
        try:
            outcome, memory = measured(lambda: outcome_of(path))
        except BaseException as error:
            error.add_note(f"mutation({index}) with SEED = {SEED}")
            raise
        outcomes[outcome] += 1
        highest = max(highest, memory)
    print(f"seed {SEED}: {dict(outcomes)}; highest memory {highest:,} bytes of {MEMORY_LIMIT:,}")
    assert highest < MEMORY_LIMIT
    assert outcomes["several lines"] == 0
    assert min(outcomes["opened"], outcomes["ModelFileError"]) > NUM_MUTATIONS // 50
