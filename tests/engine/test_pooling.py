"""One state from a prompt's states: alone, batched, chunked, preempted, with both executors."""

from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.engine.pooling import StatePool
from octavo.errors import ContextLengthError
from octavo.executors.batch import build_batch
from octavo.native import library
from tests.engines import assert_idle, drain, greedy, tiny, tokens

EXECUTORS = ["reference", *(["cpu"] if library is not None else [])]
executors = pytest.mark.parametrize("executor", EXECUTORS)
poolings = pytest.mark.parametrize("pooling", ["mean", "last"])


def pooled(llm: LLM, prompts: list[Any], pooling: Any) -> list[np.ndarray]:
    """Return the states of prompts that run together."""
    for number, prompt in enumerate(prompts):
        llm.engine.add(prompt, greedy(), request_id=str(number), pooling=pooling)
    last = {d.request_id: d for d in drain(llm.engine) if d.is_last}
    assert_idle(llm.engine)
    assert all(last[str(n)].error is None for n in range(len(prompts)))
    return [np.frombuffer(last[str(n)].pooled, "<f4") for n in range(len(prompts))]


@pytest.mark.case("V59", "S68")
@executors
@poolings
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_state_has_the_same_bits_alone_batched_chunked_and_warm(
    executor: str, pooling: str, name: str
) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 2, 16, 17, 31, 40, 65, 100)]
    with tiny(name, executor=executor, block_size=16, enable_prefix_caching=False) as llm:
        alone = [pooled(llm, [prompt], pooling)[0] for prompt in prompts]
        together = pooled(llm, prompts, pooling)
    with tiny(
        name, executor=executor, block_size=16, max_num_batched_tokens=13, max_num_seqs=8
    ) as llm:
        chunked = pooled(llm, prompts, pooling)
        warm = pooled(llm, prompts, pooling)
    for a, *others in zip(alone, together, chunked, warm, strict=True):
        for other in others:
            assert a.tobytes() == other.tobytes()
    assert len({a.tobytes() for a in alone}) == len(alone)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_last_state_times_the_vocabulary_is_the_logits(name: str) -> None:
    with tiny(name, executor="reference") as llm:
        state = pooled(llm, [tokens(20)], "last")[0]
        llm.engine.add(tokens(20), greedy())
        executor = llm.engine.executor
        logits = executor.logits(build_batch(llm.engine.scheduler.schedule()))[0]
        weights = executor.prepared.weights
        vocabulary = weights.get("lm_head", weights["embedding"])
    assert np.allclose(vocabulary @ state, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(library is None, reason="there is no native library")
@poolings
def test_executors_agree(pooling: str) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 40, 200)]
    with tiny(executor="reference") as reference, tiny(executor="cpu") as native:
        for a, b in zip(
            pooled(reference, prompts, pooling), pooled(native, prompts, pooling), strict=True
        ):
            assert np.abs(a - b).max() < 0.05 * np.abs(a).max()


def test_mean_is_the_mean_of_the_last_states() -> None:
    ids = tokens(12)["prompt_token_ids"]
    with tiny(executor="reference") as llm:
        beginnings = [{"prompt_token_ids": ids[:end]} for end in range(1, 13)]
        states = pooled(llm, beginnings, "last")
        mean = pooled(llm, [{"prompt_token_ids": ids}], "mean")[0]
    expected = np.mean(np.stack(states), axis=0, dtype=np.float64)
    assert np.allclose(mean, expected, rtol=1e-6)


def test_states_that_come_twice_count_once() -> None:
    states = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    whole, twice = StatePool(), StatePool()
    whole.add(0, states)
    twice.add(0, states[:6])
    twice.add(0, states[:3])
    twice.add(3, states[3:])
    assert whole.mean() == twice.mean()
    assert StatePool().mean() is None


@pytest.mark.case("S65")
def test_prompt_may_fill_the_context_and_no_more() -> None:
    with tiny(max_model_len=600) as llm:
        assert len(pooled(llm, [tokens(600)], "mean")) == 1
        with pytest.raises(ContextLengthError, match="601 tokens but the model holds 600"):
            llm.engine.add(tokens(601), greedy(), pooling="mean")


def test_other_requests_beside_give_the_same_tokens() -> None:
    with tiny() as llm:
        llm.engine.add(tokens(30), greedy(6), request_id="alone")
        alone = [d.token_ids for d in drain(llm.engine)]
        llm.engine.add(tokens(70, seed=1), greedy(), request_id="pooled", pooling="mean")
        llm.engine.add(tokens(30), greedy(6), request_id="beside")
        deltas = drain(llm.engine)
        assert [d.token_ids for d in deltas if d.request_id == "beside"] == alone
        assert [d.token_ids for d in deltas if d.request_id == "pooled"] == [[]]
