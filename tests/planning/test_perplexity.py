"""Perplexity against an independent implementation's logits, and how a text is cut."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.start import StartedEngine, start_engine
from octavo.errors import BadRequestError, OctavoError, SettingError
from octavo.planning.perplexity import (
    Comparison,
    Score,
    configs_to_compare,
    count_tokens,
    cut_windows,
    score_windows,
    windows_of,
)
from octavo.weights.fetch import cached_path
from tests.engines import TINY, FailingExecutor, tiny

NAMES = sorted(path.parent.name for path in TINY.glob("*/logits.npz"))
REFERENCE = {"executor": "reference", "kv_cache_dtype": "float32"}


def started(name: str = "llama", **settings: object) -> StartedEngine:
    values = {"model": str(TINY / name), "num_gpu_blocks_override": 64, **settings}
    return start_engine(EngineConfig.from_dict(values))


@pytest.fixture
def model() -> Iterator[StartedEngine]:
    engine = started()
    yield engine
    engine.engine.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def golden_window(name: str) -> tuple[list[int], np.ndarray]:
    """The first golden prompt with its answer, and the log-probability of all but its first."""
    golden = np.load(TINY / name / "logits.npz")
    ids = np.concatenate([golden["prompt0_ids"], golden["prompt0_decode_ids"]])
    num_prompt = len(golden["prompt0_ids"])
    assert golden["prompt0_prefill_positions"].tolist() == list(range(num_prompt))
    logits = np.concatenate(
        [golden["prompt0_prefill_logits"][:-1], golden["prompt0_decode_logits"]]
    )
    return ids.tolist(), log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]


# --- against golden values ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_perplexity_of_a_golden_prompt_is_that_of_its_golden_logits(name: str) -> None:
    window, expected = golden_window(name)
    with tiny(name, **REFERENCE) as llm:
        score = score_windows(llm.engine, [window])
    # The golden test of the logits allows 1e-4 of the largest logit.
    assert score.logprobs == pytest.approx(expected, abs=2e-3)
    assert score.nats == pytest.approx(-expected.mean(), abs=2e-4)
    assert score.perplexity == pytest.approx(math.exp(-expected.mean()), rel=2e-4)


@pytest.mark.real
def test_perplexity_of_the_real_model_is_that_of_transformers() -> None:
    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull smollm2-135m` does it")
    file = TINY.parent / "real" / "smollm2-135m.json"
    known = json.loads(file.read_text())["prompt_logprobs"]
    with LLM("smollm2-135m", **REFERENCE) as llm:
        score = score_windows(llm.engine, [known["prompt_ids"]])
    expected = math.exp(-sum(known["logprobs"]) / len(known["logprobs"]))
    assert score.perplexity == pytest.approx(expected, rel=1e-4)


# --- windows ------------------------------------------------------------------------------------


def test_windows_part_the_text_in_order() -> None:
    windows = cut_windows(range(10), context=4, bos_id=None)
    assert windows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert count_tokens(windows) == 7


def test_with_bos_each_window_begins_with_it_and_every_token_counts() -> None:
    windows = cut_windows(range(10), context=4, bos_id=99)
    assert windows == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8], [99, 9]]
    assert count_tokens(windows) == 10


def test_last_window_in_which_no_token_counts_is_left_out() -> None:
    assert cut_windows(range(9), context=4, bos_id=None) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("num_tokens", "bos_id", "num_counted"), [(0, None, 0), (1, None, 0), (2, None, 1), (1, 99, 1)]
)
def test_text_in_which_fewer_than_two_tokens_count_is_refused(
    num_tokens: int, bos_id: int | None, num_counted: int
) -> None:
    expected = f"{num_tokens} tokens, of which {num_counted} count"
    with pytest.raises(BadRequestError, match=expected):
        cut_windows(range(num_tokens), context=4, bos_id=bos_id)


@pytest.mark.parametrize("context", [0, 1])
def test_context_that_holds_no_pair_is_refused(context: int) -> None:
    with pytest.raises(BadRequestError, match="at least 2"):
        cut_windows(range(10), context=context, bos_id=None)


def test_only_the_first_tokens_of_a_text_are_read(model: StartedEngine) -> None:
    assert model.tokenizer is not None
    text = "the quick brown fox jumps over the lazy dog " * 3
    whole = windows_of(model, text, num_tokens=10_000, context=1023)
    cut = windows_of(model, text, num_tokens=11, context=1023)
    begin = [model.tokenizer.bos_id] if model.tokenizer.add_bos else []
    assert whole == [begin + model.tokenizer.encode(text, add_bos=False)]
    assert cut == [whole[0][: len(begin) + 11]]


def test_special_tokens_in_a_text_are_text(model: StartedEngine) -> None:
    assert model.tokenizer is not None
    (window,) = windows_of(model, f"a {model.tokenizer.eos_token} b", num_tokens=99, context=99)
    assert model.tokenizer.special_ids.isdisjoint(window[model.tokenizer.add_bos :])


def test_context_larger_than_the_models_is_refused(model: StartedEngine) -> None:
    with pytest.raises(BadRequestError, match=r"1,024 tokens .* holds 1,024.* at most 1,023"):
        windows_of(model, "a text", num_tokens=100, context=1024)


def test_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / "llama" / name, tmp_path)
    engine = started(str(tmp_path))
    with pytest.raises(BadRequestError, match="without a tokenizer"):
        windows_of(engine, "a text", num_tokens=100, context=10)
    engine.engine.close()


# --- scoring ------------------------------------------------------------------------------------


def test_score_is_in_the_order_of_the_windows_and_has_the_same_bits_alone() -> None:
    windows = [list(range(length)) for length in (40, 3, 200, 2)]
    # In parts of 16 tokens the short windows end before the long ones.
    with tiny(long_prefill_token_threshold=16) as llm:
        together = score_windows(llm.engine, windows)
        alone = [score_windows(llm.engine, [window]).logprobs for window in windows]
        assert together.executor == llm.engine.executor.name
    assert np.array_equal(together.logprobs, np.concatenate(alone))
    assert together.seconds > 0


def test_progress_ends_with_every_token(model: StartedEngine) -> None:
    told: list[tuple[int, int]] = []
    score_windows(model.engine, [[5] * 600, [1, 2]], lambda *done: told.append(done))
    assert told[-1] == (602, 602)
    assert told == sorted(told)
    assert len(told) > 1


def test_failure_of_a_window_is_raised(model: StartedEngine) -> None:
    failing = FailingExecutor(model.engine.executor, {1}, OctavoError("broken"))
    model.engine.executor = failing  # type: ignore[assignment]
    with pytest.raises(OctavoError, match="broken"):
        score_windows(model.engine, [[1, 2, 3]])


# --- figures ------------------------------------------------------------------------------------


def score_of(*logprobs: float) -> Score:
    return Score(executor="e", logprobs=np.array(logprobs), seconds=1.0)


def test_evenly_uncertain_model_has_the_vocabulary_as_perplexity() -> None:
    score = score_of(*[-math.log(300)] * 5)
    assert score.perplexity == pytest.approx(300)
    assert score.standard_error == pytest.approx(0, abs=1e-12)


def test_standard_error_is_that_of_the_mean() -> None:
    score = score_of(-1.0, -2.0, -3.0, -4.0)
    assert score.nats == 2.5
    # The sample variance is 5/3.
    assert score.standard_error == pytest.approx(math.sqrt(5 / 3 / 4))


def test_difference_is_told_with_the_error_of_the_difference() -> None:
    score, other = score_of(-1.0, -5.0, -9.0), score_of(-1.1, -5.1, -9.1)
    comparison = Comparison(score, other)
    assert comparison.ratio == pytest.approx(score.perplexity / other.perplexity)
    assert comparison.percent == pytest.approx(100 * (math.exp(-0.1) - 1))
    assert comparison.standard_error_percent == pytest.approx(0, abs=1e-9)


# --- two executors ------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["auto", "cpu"])
def test_each_executor_gets_its_own_settings_and_both_the_common_ones(executor: str) -> None:
    config = EngineConfig.from_dict(
        {"executor": executor, "dtype": "float64", "num_threads": 2, "kv_cache_dtype": "float32"}
    )
    cpu, reference = configs_to_compare(config, "reference")
    assert (cpu.executor, cpu.dtype, cpu.num_threads) == ("cpu", "auto", 2)
    assert (reference.executor, reference.dtype, reference.num_threads) == (
        "reference",
        "float64",
        None,
    )
    assert cpu.kv_cache_dtype == reference.kv_cache_dtype == "float32"
    assert configs_to_compare(reference, "cpu")[1].executor == "cpu"


@pytest.mark.parametrize(
    ("executor", "other", "words"),
    [
        ("auto", "cpu", "both executors would be cpu"),
        ("reference", "reference", "both executors would be reference"),
        ("auto", "cuda", "cpu or reference, not 'cuda'"),
        ("auto", "auto", "cpu or reference"),
    ],
)
def test_impossible_comparison_is_refused(executor: str, other: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        configs_to_compare(EngineConfig.from_dict({"executor": executor}), other)
