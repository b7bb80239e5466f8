"""Answers lm-eval's requests by `LLM`, in the environment that has Octavo.

Reads one JSON object with lists of requests from standard input, writes one with their results.
"""

import json
import sys

from octavo import LLM, SamplingParams


def likelihood(llm: LLM, first: str, rest: str) -> tuple[float, bool]:
    """Return the log-probability of `rest` after `first`, and whether it is the greedy choice."""
    stripped = first.rstrip()
    first, rest = stripped, first[len(stripped) :] + rest
    ids = llm.tokenizer.encode(first + rest, add_bos=False)
    start = len(llm.tokenizer.encode(first, add_bos=False))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    told = [output.prompt_logprobs[i][ids[i]] for i in range(start, len(ids))]
    return sum(entry.logprob for entry in told), all(entry.rank == 1 for entry in told)


def text(llm: LLM, prompt: str, stop: list[str], max_tokens: int) -> str:
    """Return the greedy continuation."""
    ids = llm.tokenizer.encode(prompt, add_bos=False)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop)
    return llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].text


def main() -> None:
    """Serve one batch."""
    asked = json.load(sys.stdin)
    with LLM(asked["model"]) as llm:
        results = {
            "likelihoods": [likelihood(llm, *pair) for pair in asked["likelihoods"]],
            "texts": [text(llm, *fields) for fields in asked["texts"]],
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
