"""What is priced is what is packed."""

import pytest

from octavo.engine.load import open_model
from octavo.executors.preparing import prepare, weight_bytes
from octavo.models.registry import WeightReader, build_program
from octavo.program.fuse import fuse
from octavo.weights.fetch import cached_path
from tests.engines import TINY, tiny
from tests.executors.native import needs_library


@needs_library
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_priced_bytes_are_those_that_the_executor_takes(name: str) -> None:
    llm = tiny(name, executor="cpu")
    executor = llm.engine.executor
    files = open_model(str(TINY / name))
    program = build_program(files.config)
    reader = WeightReader(files.config, program, files.source)
    scales = "channel" if "channel-scales" in executor.fingerprint else "group"
    prepared = prepare(program, reader.dtype, scales)
    taken = sum(array.nbytes for array in executor._kept if array.dtype == "uint8")
    assert taken == sum(prepared.weight_bytes[name] for name in prepared.formats)
    assert prepared.program == executor.program
    llm.close()


def test_formats_decide_the_bytes() -> None:
    program = build_program(open_model(str(TINY / "llama")).config)
    sizes = [
        prepare(program, lambda _: "BF16", "group", quantization=bits).total_weight_bytes
        for bits in (None, "int8", "int4")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_vectors_stay_floats() -> None:
    program = build_program(open_model(str(TINY / "llama")).config)
    prepared = prepare(program, lambda _: "BF16", "group")
    vectors = {name: shape for name, shape in program.parameters.items() if len(shape) == 1}
    assert vectors
    assert all(prepared.weight_bytes[name] == 4 * shape[0] for name, shape in vectors.items())
    assert weight_bytes(fuse(program), prepared.formats) == prepared.weight_bytes  # type: ignore[arg-type]


@pytest.mark.real
def test_a_real_model_has_the_bytes_of_its_file() -> None:
    path = cached_path("smollm2-135m")
    if path is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull` does it")
    files = open_model("smollm2-135m")
    program = build_program(files.config)
    reader = WeightReader(files.config, program, files.source)
    prepared = prepare(program, reader.dtype, "group")
    assert prepared.total_weight_bytes == pytest.approx(path.stat().st_size, rel=0.2)
