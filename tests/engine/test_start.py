"""From settings to a running engine, or to one line that says why not."""

import re
from dataclasses import replace

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.cost.hardware import MACHINES
from octavo.engine import kept, start
from octavo.engine.backend import Backend, choose_backend
from octavo.engine.load import open_model
from octavo.engine.machine import GIB, available_memory
from octavo.errors import BadRequestError, ChatTemplateError, SettingError
from octavo.executors.pages import bytes_per_token
from octavo.models.registry import WeightReader, build_program
from octavo.request import StructuredOutputs
from tests.engine.starting import FEW, refusal
from tests.engines import TINY, assert_idle, drain, greedy, only, tokens


@pytest.fixture
def copied(tmp_path):
    """A copy of the tiny Llama that a test may spoil."""
    for path in (TINY / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir()))
def test_every_tiny_model_starts_and_says_what_it_runs_on(name):
    with LLM(str(TINY / name), **FEW) as llm:
        assert only(llm, "Hello", greedy(2)).finish_reason == "length"
        first, second = llm.reasons
        assert first.startswith(f"{name} on the {llm.engine.executor.name} executor")
    assert re.search("on the (cpu|reference)", first)
    assert second.startswith("KV cache: 8 blocks of 32 tokens")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_engine_whose_prompts_are_ids_reads_merges_when_a_text_needs_them(name):
    """Most of a tokenizer's memory is what only encoding needs."""
    config = EngineConfig.from_dict({"model": str(TINY / name), **FEW})
    started = start.start_engine(config, encodes=False)
    engine, tokenizer = started.engine, started.tokenizer

    def run(**params):
        engine.add(tokens(5), greedy(3, **params))
        return drain(engine)[-1]

    assert run(stop=["z"]).finish_reason == "length"
    assert tokenizer._encoder is None
    assert run(bad_words=["a"]).finish_reason == "length"
    assert tokenizer._encoder is not None
    engine.close()


@pytest.mark.case("V13")
@pytest.mark.parametrize(
    ("settings", "bytes_per_weight"),
    [({"executor": "reference"}, 4), ({"executor": "reference", "dtype": "float64"}, 8), ({}, 2)],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch, settings, bytes_per_weight
):
    """The tiny Llama has 130,240 weights, which even the native library keeps in 16 bits."""
    monkeypatch.setattr(Backend, "build", None)
    monkeypatch.setattr(start, "available_memory", lambda: bytes_per_weight * 130_240)
    line = refusal(TINY / "llama", SettingError, **settings)
    assert line.startswith("The weights need 0.00 GiB but")


@pytest.mark.case("V13")
class TestControlGroup:
    """A machine of 64 GiB whose control group leaves this process much less."""

    @pytest.fixture
    def needs(self):
        """Bytes of the weights, and of a block."""
        files = open_model(str(TINY / "llama"))
        program = build_program(files.config)
        weights = WeightReader(files.config, program, files.source)
        backend = choose_backend(EngineConfig(model=str(TINY / "llama")), program)
        block = 32 * bytes_per_token(program.kv_groups, "bfloat16")
        return backend.weight_bytes(program, weights), block

    @pytest.fixture(params=["v1", "v2"])
    def leave(self, request, tmp_path, monkeypatch):
        """Return what sets how many bytes the group leaves."""
        names = {
            "v1": ("memory/pod", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            "v2": ("pod", "memory.max", "memory.current", ""),
        }
        folder, limit, used, prefix = names[request.param]
        line = "0::/pod" if request.param == "v2" else "4:memory:/pod"
        write(tmp_path / "proc/meminfo", f"MemAvailable: {64 << 20} kB")
        write(tmp_path / "proc/self/cgroup", line)
        monkeypatch.setattr(start, "available_memory", lambda: available_memory(tmp_path))

        def leave(free):
            group = tmp_path / "sys/fs/cgroup" / folder
            write(group / limit, str(4 * GIB))
            write(group / used, str(4 * GIB - free + 1000))
            write(group / "memory.stat", f"{prefix}inactive_file 1000")

        return leave

    def test_a_smaller_pool_is_taken_and_the_line_says_so(self, leave, needs):
        weights, block = needs
        leave(weights + 20 * block)
        with LLM(str(TINY / "llama")) as llm:
            assert llm.engine.executor.num_blocks == 10  # half of what is free, for the context
            assert llm.engine.intake.max_model_len == 320
            assert only(llm, tokens(100), greedy(3)).finish_reason == "length"
        assert "10 blocks" in llm.reasons[-1]
        assert "shortens the context" in llm.reasons[-1]

    def test_a_pool_that_was_asked_for_and_does_not_fit_is_refused(self, leave, needs, monkeypatch):
        monkeypatch.setattr(Backend, "build", None)  # nothing is loaded
        weights, block = needs
        leave(weights + 7 * block)
        line = refusal(TINY / "llama", SettingError)  # which asks for 8
        assert "num_gpu_blocks_override asks for 0.00 GiB" in line
        assert "Lower it" in line

    def test_weights_that_do_not_fit_are_refused(self, leave, needs, monkeypatch):
        monkeypatch.setattr(Backend, "build", None)
        leave(needs[0])
        assert "The weights need" in refusal(TINY / "llama", SettingError)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class TestSettings:
    def test_without_a_tokenizer_token_ids_will_do_and_text_is_refused(self, copied):
        (copied / "tokenizer.json").unlink()
        with LLM(str(copied), **FEW) as llm:
            completion = only(llm, tokens(5), greedy(3, logprobs=1))
            assert (len(completion.token_ids), completion.text) == (3, "")
            assert next(iter(completion.logprobs[0].values())).decoded_token is None
            assert not llm.has_chat_template
            with pytest.raises(BadRequestError, match="without a tokenizer"):
                llm.generate("text", greedy(3))
            with pytest.raises(ChatTemplateError, match="without a tokenizer"):
                llm.chat([{"role": "user", "content": "Hi"}])
            wanted = StructuredOutputs(regex="a+")
            with pytest.raises(BadRequestError, match="without a tokenizer, so it has no grammars"):
                only(llm, tokens(5), greedy(3, structured_outputs=wanted))
            assert_idle(llm.engine)

    @pytest.mark.parametrize("part", [".", "tokenizer.json"])
    def test_another_tokenizer_may_take_the_place_of_the_models(self, copied, part):
        (copied / "tokenizer.json").write_text("the model's own is damaged")
        with LLM(str(copied), tokenizer=str(TINY / "llama" / part), **FEW) as llm:
            assert only(llm, "text", greedy(3)).text

    def test_a_chat_template_file_takes_the_place_of_the_models(self, tmp_path):
        path = tmp_path / "short.jinja"
        path.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
        with LLM(str(TINY / "llama"), chat_template=str(path), **FEW) as llm:
            prompt = llm.chat_prompt([{"role": "user", "content": "Hi"}])
            assert prompt["prompt_token_ids"] == llm.tokenizer.encode("Hi!")

    @pytest.mark.parametrize("content", [None, b"\xff\xfe"])
    def test_a_chat_template_that_cannot_be_read_is_refused(self, tmp_path, content):
        path = tmp_path / "short.jinja"
        if content is not None:
            path.write_bytes(content)
        assert "chat_template: cannot read" in refusal(
            TINY / "llama", SettingError, chat_template=str(path)
        )

    def test_float64_arithmetic_agrees_with_float32(self):
        found = []
        for dtype in ("float32", "float64"):
            with LLM(str(TINY / "llama"), dtype=dtype, kv_cache_dtype="float32", **FEW) as llm:
                found.append(only(llm, tokens(30), greedy(6, logprobs=0)))
        assert found[0].token_ids == found[1].token_ids
        assert found[0].cumulative_logprob == pytest.approx(found[1].cumulative_logprob, abs=1e-4)
        assert found[0].logprobs != found[1].logprobs

    def test_models_of_one_architecture_have_fingerprints_of_their_own(self, copied):
        weights = copied / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[8 + int.from_bytes(content[:8], "little")] ^= 1  # a bit of the first weight
        weights.write_bytes(content)
        prints = []
        for path in (TINY / "llama", copied):
            with LLM(str(path), **FEW) as llm:
                prints.append(llm.engine.executor.fingerprint)
        assert prints[0] != prints[1]


def test_predictions_start_from_what_was_measured_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    measured = replace(MACHINES["l4"], name="this", source="measured here")
    with LLM(str(TINY / "llama"), target_itl_ms=7.5, **FEW) as llm:
        assert llm.engine.predictor.machine.source != "measured here"
        assert re.search("7.5 ms between tokens.*octavo doctor", llm.reasons[-1])
        assert llm.engine.scheduler.target_itl == 0.0075
    kept.keep(measured)
    with LLM(str(TINY / "llama"), **FEW) as llm:
        assert llm.engine.predictor.machine.source == "measured here"
        assert llm.engine.scheduler.target_itl is None


@pytest.mark.parametrize("target", [0, -1, float("nan"), "fast"])
def test_a_target_that_is_no_time_is_refused(target):
    with pytest.raises(SettingError, match="target_itl_ms"):
        LLM(str(TINY / "llama"), target_itl_ms=target, **FEW)
