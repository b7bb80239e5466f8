import json
import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.safetensors import INDEX_NAME, WEIGHTS_NAME, open_safetensors
from octavo.weights.source import TensorInfo, TensorSource, TensorType

SEED = 20_250_611
NUM_MUTATIONS = 1000
MEMORY_LIMIT = 1 << 18


def random_values(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32)


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: object, stored: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + stored


def write_shards(folder: Path) -> dict[str, np.ndarray]:
    """Write a model of two files and their index, as Hugging Face does."""
    values = {f"layers.{n}.weight": random_values(n + 1, 8) for n in range(3)}
    names = list(values)
    shards = {shard(1): names[:2], shard(2): names[2:]}
    for file, held in shards.items():
        save_file({name: values[name] for name in held}, folder / file)
    write_index(folder, {name: file for file, held in shards.items() for name in held})
    return values


def write_index(folder: Path, files: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_library_files_read_back(tmp_path, dtype):
    values = {"a": random_values(3, 5).astype(dtype), "b": random_values(2).astype(dtype)}
    save_file(values, tmp_path / WEIGHTS_NAME, metadata={"format": "np"})
    kind = TensorType.F32 if dtype is np.float32 else TensorType.F16
    with open_safetensors(tmp_path) as model:
        for name, value in values.items():
            assert model.tensors[name] == TensorInfo(name, value.shape, kind, value.nbytes)
            assert model.raw(name).tobytes() == value.tobytes()
            np.testing.assert_array_equal(
                model.float32(name), value.astype(np.float32), strict=True
            )


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    header = {"a": entry("BF16", [256, 256], 0, 1 << 17)}
    (tmp_path / "m.safetensors").write_bytes(file_of(header, bits.tobytes()))
    with open_safetensors(tmp_path / "m.safetensors") as model:
        values = model.float32("a")
    assert values.shape == (256, 256)
    np.testing.assert_array_equal(values.view(np.uint32), bits.astype(np.uint32) << 16)


def test_file_may_be_given_by_its_path(tmp_path):
    save_file({"a": random_values(4)}, tmp_path / "other-name.safetensors")
    source: TensorSource = open_safetensors(str(tmp_path / "other-name.safetensors"))
    with source as model:
        np.testing.assert_array_equal(model.float32("a"), random_values(4))


def test_raw_bytes_are_a_view_that_cannot_be_written_and_float32_a_copy_that_can(tmp_path):
    save_file({"a": random_values(4)}, tmp_path / WEIGHTS_NAME)
    with open_safetensors(tmp_path) as model:
        raw = model.raw("a")
        assert not raw.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            raw[0] = 1
        model.float32("a")[:] = 42
        np.testing.assert_array_equal(model.float32("a"), random_values(4))
    np.testing.assert_array_equal(raw.view(np.float32), random_values(4))


def test_scalars_empty_tensors_and_unaligned_data_read(tmp_path):
    header = {
        "empty": entry("F32", [0, 3], 2, 2),
        "half": entry("F16", [], 0, 2),
        "whole": entry("F32", [1, 1], 2, 6),
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + 1)  # so that the data begin at an odd byte
    stored = struct.pack("<ef", 0.5, -3.0)
    (tmp_path / WEIGHTS_NAME).write_bytes(file_of(text, stored))
    with open_safetensors(tmp_path) as model:
        assert model.float32("half") == 0.5
        assert model.float32("whole") == [[-3.0]]
        assert model.float32("empty").shape == (0, 3)


@pytest.mark.parametrize("given", ["", shard(1), shard(2)])
def test_folder_or_any_shard_opens_the_whole_model(tmp_path, given):
    values = write_shards(tmp_path)
    with open_safetensors(tmp_path / given) as model:
        assert list(model.tensors) == list(values)
        for name, value in values.items():
            np.testing.assert_array_equal(model.float32(name), value)


@pytest.mark.case("S71")
@pytest.mark.parametrize("number", [1, 2])
def test_missing_shard_is_named(tmp_path, number):
    write_shards(tmp_path)
    (tmp_path / shard(number)).unlink()
    with pytest.raises(ModelFileError, match=rf"1 of the 2 files.*'{shard(number)}' is missing"):
        open_safetensors(tmp_path)


@pytest.mark.case("S71")
def test_shard_without_index_is_refused(tmp_path):
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(ModelFileError, match=rf"{INDEX_NAME} is missing"):
        open_safetensors(tmp_path / shard(1))


def test_folder_without_weights_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"neither model\.safetensors nor"):
        open_safetensors(tmp_path)


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        open_safetensors(tmp_path / "absent.safetensors")


def test_index_may_not_name_a_tensor_that_its_shard_lacks(tmp_path):
    write_shards(tmp_path)
    write_index(tmp_path, {"layers.0.weight": shard(1), "absent": shard(2)})
    with pytest.raises(ModelFileError, match=f"tensor 'absent' is in {shard(2)}, which does not"):
        open_safetensors(tmp_path)


@pytest.mark.case("S76")
@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "..", "", "a\0b", 7, None]
)
def test_index_may_not_reach_out_of_its_folder(tmp_path, file):
    write_index(tmp_path, {"a": file})
    with pytest.raises(ModelFileError, match="tensor 'a' is in the file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("files", [None, [], {}, "a"])
def test_index_without_a_map_is_refused(tmp_path, files):
    write_index(tmp_path, files)
    with pytest.raises(ModelFileError, match="it has no weight_map"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "F64", "BOOL", "nonsense"])
def test_unsupported_dtype_names_tensor_and_dtype(tmp_path, dtype):
    header = {"fine": entry("F32", [1], 0, 4), "bad": entry(dtype, [1], 4, 12)}
    (tmp_path / WEIGHTS_NAME).write_bytes(file_of(header, bytes(12)))
    with pytest.raises(UnsupportedModelError, match=f"tensor 'bad' is stored as '{dtype}'"):
        open_safetensors(tmp_path)


FOUR = entry("F32", [1], 0, 4)
# What is wrong, the file, and words that its error must have.
REFUSED = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "has only 7 bytes"),
    "web page": (b"<!doctype html><html></html>", "is a web page"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(32), "is a GGUF file"),
    "header of 2^64 - 1 bytes": (file_of({}, length=2**64 - 1), "18,446,744,073,709,551,615 bytes"),
    "header of 2^60 bytes": (file_of({}, length=2**60), "1,152,921,504,606,846,976 bytes"),
    "header one byte too long": (file_of({}, length=3), "should take 3 bytes"),
    "header of 0 bytes": (file_of(b"", bytes(8)), r"begin with b'\x00'"),
    "header a list": (file_of([1]), "begin with b'['"),
    "header not JSON": (file_of(b"{'a': 1}"), "cannot be read"),
    "header not UTF-8": (file_of(b'{"\xff": 1}'), "cannot be read"),
    "header cut": (file_of(b'{"a": {"dtype": "F3'), "cannot be read"),
    "nested 100,000 deep": (file_of(b'{"a":' * 100_000), "cannot be read"),
    "same name twice": (
        file_of(b'{"a": %b, "a": %b}' % ((json.dumps(FOUR).encode(),) * 2), bytes(4)),
        "a name occurs twice",
    ),
    "half a surrogate pair": (file_of(b'{"\\ud800": 1}'), "cannot be read"),
    "entry a number": (file_of({"a": 1}), "should have a dtype, a shape"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}), "should have a dtype"),
    "dtype a number": (file_of({"a": entry(7, [1], 0, 4)}, bytes(4)), "should be a string"),
    "shape a string": (file_of({"a": entry("F32", "1", 0, 4)}, bytes(4)), "short list of sizes"),
    "shape of floats": (file_of({"a": entry("F32", [1.0], 0, 4)}, bytes(4)), "list of sizes"),
    "shape of booleans": (file_of({"a": entry("F32", [True], 0, 4)}, bytes(4)), "list of sizes"),
    "negative shape": (file_of({"a": entry("F32", [-1, -1], 0, 4)}, bytes(4)), "list of sizes"),
    "size of 2^64": (file_of({"a": entry("F32", [2**64], 0, 4)}, bytes(4)), "list of sizes"),
    "product wraps to 1": (
        file_of({"a": entry("F32", [2**63 + 1, 2**63 + 1], 0, 4)}, bytes(4)),
        "but its data_offsets are (0, 4)",
    ),
    "a thousand dimensions": (
        file_of({"a": entry("F32", [1] * 1000, 0, 4)}, bytes(4)),
        "short list of sizes",
    ),
    "a number of 5,000 digits": (
        file_of(b'{"a": {"dtype": "F32", "shape": [%b]}}' % (b"9" * 5000)),
        "cannot be read",
    ),
    "three offsets": (
        file_of({"a": {**FOUR, "data_offsets": [0, 4, 4]}}, bytes(4)),
        "data_offsets are (0, 4, 4)",
    ),
    "offsets backwards": (file_of({"a": entry("F32", [1], 4, 0)}, bytes(4)), "are (4, 0)"),
    "shape too large": (file_of({"a": entry("F32", [2], 0, 4)}, bytes(4)), "should take 8 bytes"),
    "shape too small": (file_of({"a": entry("F16", [1], 0, 4)}, bytes(4)), "should take 2 bytes"),
    "beyond the file": (file_of({"a": FOUR}, bytes(3)), "take 4 bytes, but it has 3"),
    "bytes left over": (file_of({"a": FOUR}, bytes(5)), "take 4 bytes, but it has 5"),
    "overlap": (
        file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "tensor 'b' begins at byte 4 after the header instead of 8",
    ),
    "hole": (
        file_of({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
        "tensor 'b' begins at byte 8 after the header instead of 4",
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "map names to strings"),
    "metadata a list": (file_of({"__metadata__": []}), "map names to strings"),
}


def measured_refusal(path: Path) -> tuple[str, int]:
    """Return the message of the error, and the most memory in bytes that it took to find it."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_safetensors(path)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.case("S76")
@pytest.mark.parametrize("fault", REFUSED)
def test_fault_is_refused_in_one_line_with_little_memory(tmp_path, fault):
    content, words = REFUSED[fault]
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(content)
    message, memory = measured_refusal(path)
    assert words in message
    assert str(path) in message
    assert len(message.splitlines()) == 1
    assert memory < 10 * len(content) + MEMORY_LIMIT


def mutation(index: int) -> bytes:
    """Return a mutated file of this index: the same for the same SEED."""
    draw = random.Random(f"{SEED}/{index}")
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [4], 24, 32),
        "c": entry("F16", [2, 1], 32, 36),
    }
    text, stored, length = bytearray(json.dumps(header).encode()), bytes(range(36)), None
    for _ in range(draw.choice([1, 1, 2, 4])):
        position, source = draw.randrange(len(text)), draw.randrange(len(text))
        match draw.randrange(6):
            case 0:
                text[position] = draw.randrange(256)
            case 1:
                digits = [place for place, letter in enumerate(text) if letter in b"0123456789"]
                text[draw.choice(digits)] = draw.choice(b"0123456789")
            case 2:
                text[position : position + 8] = text[source : source + draw.randrange(16)]
            case 3:
                text = text.replace(b'"F16"', draw.choice([b'"BF16"', b'"F32"', b'"I16"']))
            case 4:
                stored = stored[: draw.randrange(36)]
            case _:
                length = draw.choice([len(text) - 1, len(text) + 1, 2**60, 0])
    return file_of(bytes(text), stored, length)


def library_reads(content: bytes) -> dict[str, tuple] | None:
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (tuple(t["shape"]), t["dtype"], bytes(t["data"])) for name, t in tensors}


def octavo_reads(path: Path) -> dict[str, tuple]:
    with open_safetensors(path) as model:
        for name, info in model.tensors.items():
            assert model.float32(name).shape == info.shape
        return {
            name: (info.shape, info.dtype.value, model.raw(name).tobytes())
            for name, info in model.tensors.items()
        }


@pytest.mark.case("S76")
def test_mutated_files_read_as_in_the_library_or_are_refused(tmp_path):
    """What Octavo accepts, the library accepts and reads alike; Octavo may refuse more."""
    path = tmp_path / "m.safetensors"
    outcomes = Counter()
    for index in range(NUM_MUTATIONS):
        content = mutation(index)
        path.write_bytes(content)
        try:
            read = octavo_reads(path)
        except (ModelFileError, UnsupportedModelError) as error:
            outcomes[type(error).__name__] += 1
        else:
            assert read == library_reads(content), f"mutation({index}) with SEED = {SEED}"
            outcomes["opened"] += 1
    print(f"seed {SEED}: {dict(outcomes)}")
    assert min(outcomes["opened"], outcomes["ModelFileError"]) > NUM_MUTATIONS // 50


def test_library_refuses_nearly_all_the_same_faults():
    accepted = {
        fault for fault, (content, _) in REFUSED.items() if library_reads(content) is not None
    }
    # Of two entries it keeps the last; NumPy has no arrays of more than 64 dimensions.
    assert accepted == {"same name twice", "a thousand dimensions"}
