"""Which executor computes: what the settings ask, what the model needs, what the machine has."""

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine import backend
from octavo.engine.backend import choose_backend
from octavo.engine.load import open_model
from octavo.errors import SettingError
from octavo.executors.packing import packed_bytes
from octavo.models.registry import WeightReader, build_program
from octavo.native import library
from octavo.program.program import Program
from tests.engine.starting import refusal
from tests.engines import TINY, greedy, only, tokens
from tests.program.networks import network

needs_library = pytest.mark.skipif(library is None, reason="the native library is not built")
ODD_HEADS = network(head_dim=24)


def choose(program: Program | None = None, **settings):
    return choose_backend(EngineConfig(**settings), program or network())


def test_the_reference_runs_where_it_is_asked_for_and_gives_no_reason():
    chosen = choose(executor="reference")
    assert (chosen.instruction_set, chosen.num_threads, chosen.reason) == (None, 1, "")


def test_without_the_library_the_reference_runs_and_the_first_line_says_why(monkeypatch):
    monkeypatch.setattr(backend, "library", None)
    monkeypatch.setattr(backend, "why_missing", "there was no compiler")
    assert choose().reason == "there was no compiler"
    with LLM(str(TINY / "llama"), num_gpu_blocks_override=8) as llm:
        assert llm.reasons[0] == "llama on the reference executor, since there was no compiler"
    with pytest.raises(SettingError, match=r"cpu executor cannot run here: there was no compiler"):
        choose(executor="cpu")


@pytest.mark.parametrize("setting", [{"instruction_set": "avx2"}, {"num_threads": 2}])
def test_settings_of_the_library_are_refused_where_the_reference_runs(setting):
    (name,) = setting
    with pytest.raises(SettingError, match=rf"{name} is a setting of the cpu executor"):
        choose(executor="reference", **setting)


@needs_library
class TestNative:
    def test_the_best_instruction_set_of_the_machine_runs_by_default(self):
        for executor in ("auto", "cpu"):
            chosen = choose(executor=executor)
            assert (chosen.instruction_set, chosen.reason) == (library.instruction_sets()[0], "")

    def test_an_instruction_set_that_is_emulated_runs_only_where_it_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(library, "instruction_sets", lambda: ["amx", "avx2", "generic"])
        monkeypatch.setattr(library, "emulated", ["amx"])
        assert choose().instruction_set == "avx2"
        assert choose(instruction_set="amx").instruction_set == "amx"

    @pytest.mark.parametrize("name", library.instruction_sets() if library else [])
    def test_every_instruction_set_of_the_machine_can_be_asked_for(self, name):
        assert choose(instruction_set=name).instruction_set == name
        settings = {"num_gpu_blocks_override": 8, "instruction_set": name, "num_threads": 1}
        with LLM(str(TINY / "llama"), **settings) as llm:
            assert name in llm.reasons[0]
            assert len(only(llm, tokens(5), greedy(2)).token_ids) == 2

    def test_an_instruction_set_that_is_not_here_is_refused_with_those_that_are(self, monkeypatch):
        monkeypatch.setattr(library, "instruction_sets", lambda: ["generic"])
        line = refusal(TINY / "llama", SettingError, instruction_set="avx512")
        assert "instruction_set avx512" in line
        assert line.endswith("which have generic.")

    def test_as_many_threads_as_cpus_unless_told_otherwise(self, monkeypatch):
        monkeypatch.setattr(backend, "available_cpus", lambda: 5)
        assert choose().num_threads == 5
        assert choose(num_threads=3).num_threads == 3

    def test_heads_that_the_library_cannot_run_go_to_the_reference_with_a_reason(self):
        chosen = choose(ODD_HEADS)
        assert chosen.instruction_set is None
        assert "heads of 16 to 512" in chosen.reason
        assert "not 24" in chosen.reason
        with pytest.raises(SettingError, match=r"cpu executor cannot run here: .* not 24"):
            choose(ODD_HEADS, executor="cpu")

    def test_float64_goes_to_the_reference_with_a_reason(self):
        chosen = choose(dtype="float64")
        assert (chosen.instruction_set, chosen.dtype.__name__) == (None, "float64")
        assert "dtype float64" in chosen.reason
        with pytest.raises(SettingError, match=r"cpu executor cannot run here: dtype float64"):
            choose(executor="cpu", dtype="float64")

    def test_weights_are_counted_as_they_are_packed_and_tied_ones_once(self):
        """The tiny Llama's head has the weights of its embedding."""
        files = open_model(str(TINY / "llama"))
        program = build_program(files.config)
        weights = WeightReader(files.config, program, files.source)
        counted = choose(program).weight_bytes(program, weights)
        vectors = sum(4 * s[0] for s in program.parameters.values() if len(s) == 1)
        assert counted == vectors + sum(packed_bytes(shape, "bf16") for shape in matrices(program))
        assert counted > 2 * sum(a * b for a, b in matrices(program))
        assert choose(program, executor="reference").weight_bytes(program, weights) == 4 * 130_240


def matrices(program: Program) -> list[tuple[int, int]]:
    return [(shape[0], shape[1]) for shape in program.parameters.values() if len(shape) == 2]
