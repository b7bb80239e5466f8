"""The real models: what Hugging Face transformers computes from the same files, and a chat.

Greedy tokens may differ from the golden ones only where transformers itself was undecided: a margin
below 1e-3 between the best two logits. What follows such a tie is no longer comparable.
"""

import json
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.weights.fetch import cached_path

GOLDEN = Path(__file__).parent / "golden" / "real"
TIE = 1e-3
LOGPROB_TOLERANCE = 1e-4  # measured: 1.9e-5 with float32 pages

pytestmark = pytest.mark.real


def start(name, **settings):
    if cached_path(name) is None:
        pytest.skip(f"{name} has not been fetched; `octavo pull {name}` does it")
    return LLM(name, **settings)


def num_equal(found, golden):
    """How many leading tokens agree."""
    pairs = enumerate(zip(found, golden, strict=True))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), len(golden))


# Gemma takes twice as long, so the default suite runs the four shortest of its ten prompts.
@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [
        ("smollm2-135m", 10),
        ("gemma3-270m", 4),
        pytest.param("gemma3-270m", 10, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_prompt_logprobs_equal_those_of_transformers(name, num_prompts):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    prompts = sorted(golden["prompts"], key=lambda p: len(p["prompt_ids"]))[:num_prompts]
    known = golden["prompt_logprobs"]
    greedy = SamplingParams(temperature=0, max_tokens=golden["num_tokens"], ignore_eos=True)
    report = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with start(name, executor="reference", kv_cache_dtype="float32") as llm:
        for prompt in [*prompts, known]:
            assert (
                llm.tokenizer.encode(prompt["prompt"], parse_special=True) == prompt["prompt_ids"]
            )
        *outputs, reported = llm.generate(
            [{"prompt_token_ids": prompt["prompt_ids"]} for prompt in [*prompts, known]],
            [greedy] * len(prompts) + [report],
        )
    num_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        agreed = num_equal(output.outputs[0].token_ids, prompt["tokens"])
        if agreed < golden["num_tokens"]:
            margin = prompt["margins"][agreed]
            assert margin < TIE, f"{prompt['kind']} differs at token {agreed}, margin {margin}"
            num_ties += 1
    print(f"{name}: {num_prompts} prompts, {num_ties} ended at a tie")
    first, *positions = reported.prompt_logprobs
    assert first is None
    likeliest = [min(p, key=lambda token: p[token].rank) for p in positions]
    assert likeliest == golden["prompt_logprobs"]["likeliest_ids"]
    found = [p[i].logprob for p, i in zip(positions, known["prompt_ids"][1:], strict=True)]
    assert found == pytest.approx(known["logprobs"], abs=LOGPROB_TOLERANCE)


# Whose answer no rounding of an instruction set makes nonsense.
README_QUESTION = "Explain in one sentence why the sky is blue."


def test_the_default_model_answers_a_question_with_default_settings():
    with start("smollm2-135m") as llm:
        messages = [{"role": "user", "content": README_QUESTION}]
        params = SamplingParams(temperature=0, max_tokens=60)
        (output,) = llm.chat(messages, params, use_tqdm=False)
    assert "scatter" in output.outputs[0].text
