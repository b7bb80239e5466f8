import os
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import tests.weights.gguf_files as files
from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.weights import quants
from octavo.weights.gguf import GGUFFile, open_gguf
from octavo.weights.source import TensorInfo, TensorSource, TensorType

QUANTIZABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Bytes of each block that hold half-precision scales.
K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Root mean square error of standard normal values: a fair reading of each type's step.
EXPECTED_ERROR = {
    "F32": 0,
    "F16": 4e-4,
    "BF16": 3e-3,
    "Q8_0": 0.01,
    "Q4_0": 0.12,
    "Q4_1": 0.12,
    "Q5_0": 0.06,
    "Q5_1": 0.06,
}
# Rows and columns that leave a ragged last slice after two whole ones.
SHAPE = (259, 1024)
assert 0 < SHAPE[0] * SHAPE[1] % quants.SLICE_ELEMENTS < quants.SLICE_ELEMENTS


def random_values(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32)


def random_blocks(name: str, shape: tuple[int, int]) -> np.ndarray:
    """Random bytes of a K type, whose scales are finite, as (rows, bytes)."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, size), np.uint8)
    for position in K_SCALES[name]:
        scales = rng.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, position : position + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_with_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **options) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(1)
    for name, (stored, dtype) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_small(path: Path, **options) -> Path:
    path.write_bytes(files.build(*files.small_model(), **options).content)
    return path


@pytest.mark.parametrize("dtype", [*QUANTIZABLE, *K_SCALES])
def test_every_type_decodes_as_the_gguf_package_decodes_it(tmp_path, dtype):
    kind = GGMLQuantizationType[dtype]
    stored = (
        random_blocks(dtype, SHAPE)
        if dtype in K_SCALES
        else gguf.quants.quantize(random_values(SHAPE), kind)
    )
    path = tmp_path / "model.gguf"
    write_with_gguf(path, {"weight": (stored, dtype)})

    with open_gguf(path) as model:
        assert model.tensors["weight"] == TensorInfo(
            "weight", SHAPE, TensorType(dtype), stored.nbytes
        )
        np.testing.assert_array_equal(model.raw("weight"), stored.view(np.uint8).reshape(-1))
        values = model.float32("weight")
    assert values.dtype == np.float32
    assert values.shape == SHAPE
    assert values.flags.c_contiguous
    assert values.flags.owndata or values.base.flags.owndata
    np.testing.assert_array_equal(values, gguf.quants.dequantize(stored, kind).reshape(SHAPE))


@pytest.mark.parametrize("dtype", QUANTIZABLE)
def test_decoded_values_are_near_those_that_were_quantised(tmp_path, dtype):
    values = random_values((8, 256))
    stored = gguf.quants.quantize(values, GGMLQuantizationType[dtype])
    write_with_gguf(tmp_path / "model.gguf", {"weight": (stored, dtype)})
    with open_gguf(tmp_path / "model.gguf") as model:
        error = np.sqrt(np.mean((model.float32("weight") - values) ** 2))
    assert error <= EXPECTED_ERROR[dtype]


def test_table_of_block_sizes_is_that_of_the_gguf_package():
    for dtype in TensorType:
        expected = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        assert (dtype.block_elements, dtype.block_bytes) == expected


def test_shape_is_row_major(tmp_path):
    write_with_gguf(tmp_path / "m.gguf", {"weight": (random_values((2, 3, 5)), "F32")})
    with open_gguf(tmp_path / "m.gguf") as model:
        assert model.tensors["weight"].shape == (2, 3, 5)
        np.testing.assert_array_equal(model.float32("weight"), random_values((2, 3, 5)))


def test_raw_bytes_are_a_view_that_cannot_be_written_and_float32_a_copy_that_can(tmp_path):
    with open_gguf(write_small(tmp_path / "model.gguf")) as model:
        raw = model.raw("output_norm.weight")
        assert not raw.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            raw[0] = 1
        values = model.float32("blk.0.attn_norm.weight")
        values[0] = 42
        assert model.float32("blk.0.attn_norm.weight")[0] == 1


def test_views_outlive_close_but_no_new_ones_are_given(tmp_path):
    model = open_gguf(write_small(tmp_path / "model.gguf"))
    raw = model.raw("blk.0.attn_norm.weight")
    model.close()
    assert struct.unpack("<5f", raw.tobytes()) == (1, 2, 3, 4, 5)
    assert model.metadata["tokenizer.ggml.tokens"] == ["<s>", "", "é", "token"]
    with pytest.raises(ValueError, match="is closed"):
        model.raw("blk.0.attn_norm.weight")


def test_file_is_a_tensor_source(tmp_path):
    source: TensorSource = open_gguf(write_small(tmp_path / "model.gguf"))
    with source as opened:
        assert opened is source
        assert next(iter(source.tensors)) == "token_embd.weight"


def test_unknown_tensor_names_the_nearest_one(tmp_path):
    with (
        open_gguf(write_small(tmp_path / "model.gguf")) as model,
        pytest.raises(ModelFileError, match=r"Did you mean 'blk\.0\.attn_q\.weight'"),
    ):
        model.float32("blk.0.attn_k.weight")


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind_is_plain_python(tmp_path, version):
    pairs, _ = files.small_model()
    metadata = open_gguf(write_small(tmp_path / "model.gguf", version=version)).metadata
    assert list(metadata) == [pair.key for pair in pairs]
    for key, _, value in pairs:
        expected = value.elements if isinstance(value, files.Array) else value
        assert metadata[key] == expected
        assert type(metadata[key]) is type(expected)
        for element in expected if isinstance(expected, list) else []:
            assert type(element) in {str, int, float, bool}
    assert "test.bools" in metadata
    assert metadata.get("test.absent") is None
    assert len(metadata) == len(pairs)


def test_builder_writes_what_the_gguf_package_reads(tmp_path):
    pairs, tensors = files.small_model()
    reader = gguf.GGUFReader(write_small(tmp_path / "model.gguf"))
    for pair in pairs:
        if pair.key != "test.empty":
            value = pair.value.elements if isinstance(pair.value, files.Array) else pair.value
            assert reader.fields[pair.key].contents() == value
    for tensor, read in zip(tensors, reader.tensors, strict=True):
        assert (tensor.name, tensor.dims) == (read.name, tuple(read.shape))
        assert tensor.stored == read.data.tobytes()


def test_a_whole_file_needs_no_alignment_key_and_may_choose_its_own(tmp_path):
    _, tensors = files.small_model()
    for alignment, pairs in [
        (32, []),
        (8, [files.Pair("general.alignment", files.UINT32, 8)]),
        (4096, [files.Pair("general.alignment", files.UINT32, 4096)]),
    ]:
        path = tmp_path / f"{alignment}.gguf"
        path.write_bytes(files.build(pairs, tensors, alignment=alignment).content)
        with open_gguf(path) as model:
            for tensor in tensors:
                assert model.raw(tensor.name).tobytes() == tensor.stored


def test_last_tensor_needs_no_padding(tmp_path):
    content = files.build(*files.small_model()).content
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: len(content) - 20])  # 12 bytes of values, 20 of padding
    with open_gguf(path) as model:
        assert model.raw("output_norm.weight").tobytes() == bytes(range(12))


def test_file_without_tensors_opens(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(files.build(files.small_model()[0], []).content)
    with open_gguf(path) as model:
        assert not model.tensors
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 4


@pytest.mark.parametrize("pattern", [b"\xff\xff", b"\x00\x7c"], ids=["nan", "infinity times 0"])
def test_damaged_scales_decode_to_something_without_a_warning(tmp_path, pattern):
    tensors = [
        files.Tensor(str(dtype), (256,), number, pattern * (dtype.block_bytes // 2 * blocks))
        for number, dtype, blocks in [
            (8, TensorType.Q8_0, 8),
            (3, TensorType.Q4_1, 8),
            (12, TensorType.Q4_K, 1),
            (14, TensorType.Q6_K, 1),
            (1, TensorType.F16, 256),
            (30, TensorType.BF16, 256),
        ]
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(files.build([], tensors).content)
    with open_gguf(path) as model:
        for tensor in tensors:
            assert model.float32(tensor.name).shape == (256,)


# --- split models


def write_split(folder: Path) -> dict[str, np.ndarray]:
    """Write a model of three tensors in three parts with the gguf package."""
    values = {f"blk.{n}.weight": random_values((n + 1, 32)) for n in range(3)}
    tensors = {name: (value, "F32") for name, value in values.items()}
    write_with_gguf(folder / "tiny.gguf", tensors, split_max_tensors=1)
    return values


def part(number: int, total: int = 3) -> str:
    return f"tiny-{number:05d}-of-{total:05d}.gguf"


def assert_holds(model: GGUFFile, values: dict[str, np.ndarray]) -> None:
    assert list(model.tensors) == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(model.float32(name), value)
    assert model.metadata["general.architecture"] == "llama"


@pytest.mark.case("S71")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_opens_the_whole_model(tmp_path, number):
    values = write_split(tmp_path)
    with open_gguf(tmp_path / part(number)) as model:
        assert model.path == tmp_path / part(1)
        assert_holds(model, values)


@pytest.mark.case("S71")
def test_parts_may_be_links_as_in_the_hub_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    values = write_split(tmp_path / "blobs")
    for number in (1, 2, 3):
        blob = tmp_path / "blobs" / f"{number:064x}"
        os.rename(tmp_path / "blobs" / part(number), blob)
        (tmp_path / "snapshot" / part(number)).symlink_to(blob)
    with open_gguf(tmp_path / "snapshot" / part(1)) as model:
        assert_holds(model, values)


@pytest.mark.case("S71")
@pytest.mark.parametrize(("given", "missing"), [(1, 2), (1, 3), (2, 1)])
def test_missing_part_is_named(tmp_path, given, missing):
    write_split(tmp_path)
    (tmp_path / part(missing)).unlink()
    with pytest.raises(ModelFileError, match=rf"2 of the 3 parts.*{re.escape(part(missing))}"):
        open_gguf(tmp_path / part(given))


@pytest.mark.case("S71")
def test_missing_part_that_was_asked_for_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match="00001-of-00003"):
        open_gguf(tmp_path / part(1))


@pytest.mark.case("S71")
def test_part_under_another_name_says_so(tmp_path):
    write_split(tmp_path)
    os.rename(tmp_path / part(1), tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="part 1 of a model split into 3"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.case("S71")
def test_parts_with_swapped_names_are_refused(tmp_path):
    write_split(tmp_path)
    os.rename(tmp_path / part(2), tmp_path / "kept")
    os.rename(tmp_path / part(3), tmp_path / part(2))
    os.rename(tmp_path / "kept", tmp_path / part(3))
    with pytest.raises(ModelFileError, match="named as part 2 of 3, but calls itself part 3"):
        open_gguf(tmp_path / part(1))


@pytest.mark.case("S71")
@pytest.mark.parametrize("name", [part(0), part(4), part(1, 0)])
def test_impossible_part_number_is_refused(tmp_path, name):
    write_split(tmp_path)
    os.rename(tmp_path / part(1), tmp_path / name)
    with pytest.raises(ModelFileError, match="calls itself part"):
        open_gguf(tmp_path / name)


def write_two_parts(folder: Path, names: list[str], promised: int) -> Path:
    for number, name in enumerate(names):
        pairs = [
            files.Pair("split.no", files.UINT16, number),
            files.Pair("split.count", files.UINT16, 2),
            files.Pair("split.tensors.count", files.INT32, promised),
        ]
        tensors = [files.Tensor(name, (8,), files.F32, bytes(32))]
        (folder / part(number + 1, 2)).write_bytes(files.build(pairs, tensors).content)
    return folder / part(1, 2)


@pytest.mark.case("S71")
def test_tensor_in_two_parts_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="repeats tensor 'a' of an earlier part"):
        open_gguf(write_two_parts(tmp_path, ["a", "a"], 2))


@pytest.mark.case("S71")
def test_parts_hold_as_many_tensors_as_promised(tmp_path):
    assert len(open_gguf(write_two_parts(tmp_path, ["a", "b"], 2)).tensors) == 2
    with pytest.raises(ModelFileError, match=r"promises 3 tensors .* hold 2"):
        open_gguf(write_two_parts(tmp_path, ["a", "b"], 3))


# --- what Octavo does not read


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        open_gguf(tmp_path / "absent.gguf")


@pytest.mark.case("S74")
@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_other_versions_are_refused(tmp_path, version):
    with pytest.raises(UnsupportedModelError, match=rf"version {version:,}, .* versions 2 and 3"):
        open_gguf(write_small(tmp_path / "model.gguf", version=version))


def test_big_endian_file_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("weight", random_values((2, 32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(("number", "name"), [(10, "Q2_K"), (26, "I32"), (999, "an unknown type")])
def test_unsupported_tensor_type_names_tensor_and_type(tmp_path, number, name):
    tensors = [
        files.Tensor("good.weight", (8,), files.F32, bytes(32)),
        files.Tensor("bad.weight", (256,), number, bytes(84)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(files.build([], tensors).content)
    with pytest.raises(UnsupportedModelError, match=rf"'bad\.weight' is stored as {name} .*Q4_K"):
        open_gguf(path)


# --- the real models


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def real_model(request) -> Path:
    from octavo.weights.fetch import cached_path

    path = cached_path(request.param)
    if path is None:
        pytest.skip(f"{request.param} has not been downloaded")
    return path


@pytest.mark.real
def test_real_model_opens_and_decodes_as_the_gguf_package_does(real_model):
    with open_gguf(real_model) as model:
        tokens = model.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(model.metadata["tokenizer.ggml.token_type"])
        assert model.tensors["token_embd.weight"].shape[0] == len(tokens)
        for info in model.tensors.values():
            assert model.raw(info.name).size == info.num_bytes
        largest_first = sorted(model.tensors.values(), key=lambda info: -info.num_bytes)
        smallest = {info.dtype: info for info in largest_first}
        for dtype, info in smallest.items():
            stored = model.raw(info.name).reshape(info.shape[0], -1)
            expected = gguf.quants.dequantize(stored, GGMLQuantizationType[dtype])
            np.testing.assert_array_equal(
                model.float32(info.name), expected.reshape(info.shape), strict=True
            )


@pytest.mark.slow
@pytest.mark.real
def test_real_model_reads_as_the_gguf_package_reads_it(real_model):
    reader = gguf.GGUFReader(real_model)
    with open_gguf(real_model) as model:
        for key, value in model.metadata.items():
            assert reader.fields[key].contents() == value
        assert [tensor.name for tensor in reader.tensors] == list(model.tensors)
        for tensor in reader.tensors:
            assert model.raw(tensor.name).tobytes() == tensor.data.tobytes()
            assert model.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))


def test_released_bytes_are_read_again(tmp_path):
    values = np.arange(4096 * 4, dtype=np.float32).reshape(4096, 4)
    write_with_gguf(tmp_path / "model.gguf", {"w": (values, "F32")})
    with open_gguf(tmp_path / "model.gguf") as source:
        view = source.raw("w")
        source.release("w")
        assert view.tobytes() == values.tobytes()
        with pytest.raises(ModelFileError, match="no tensor"):
            source.release("x")
