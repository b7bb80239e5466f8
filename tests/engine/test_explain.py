"""A life in words: what each case is told as."""

from typing import Any

import pytest

from octavo.core.lookup import CacheLookup, CacheMiss
from octavo.engine.explain import because, duration, explain, what
from octavo.engine.lives import Life, Part, Work


def life(*parts: Part, **fields: Any) -> Life:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "arrival_time": 100.0,
        "until": 103.0,
        "num_prompt_tokens": 1310,
        "num_samples": 1,
        "is_pooled": False,
        "num_generated_tokens": 97,
        "finish_reason": "length",
        "admitted_at": 100.34,
    }
    return Life(parts=parts, **{**defaults, **fields})


def lookup(num_tokens: int, miss: CacheMiss, **fields: Any) -> CacheLookup:
    return CacheLookup(num_tokens=num_tokens, miss=miss, **fields)


def work(steps: int, chunks: int, seconds: float, bound: str = "", share: float = 0.0) -> Work:
    by_bound = {bound: seconds} if bound else {}
    return Work(
        num_steps=steps, num_chunks=chunks, seconds=seconds, limit=share * seconds
    )._replace(**by_bound)


def test_a_whole_life_reads_as_one_would_tell_it() -> None:
    told = explain(
        life(
            Part(name="queued", reason="blocks", seconds=0.34),
            Part(
                name="prefill",
                seconds=0.41,
                num_tokens=286,
                num_beside=42,
                work=work(3, 45, 0.41, "compute", 0.61),
            ),
            Part(name="decode", seconds=2.016, work=work(96, 1440, 2.016, "memory", 0.83)),
            Part(name="recompute", seconds=0.1, num_tokens=212, work=work(1, 15, 0.1)),
            Part(name="preempted", reason="blocks", seconds=0.12),
            Part(name="between", seconds=0.014),
            cache=lookup(1024, CacheMiss.DIFFERS, num_sources=1, oldest=88.34, newest=88.34),
            num_preemptions=1,
            num_recomputed_tokens=212,
            num_recovered_tokens=1000,
        )
    )
    assert told == [
        "Queued 340 ms because no blocks were free.",
        "1,024 of 1,310 prompt tokens came from blocks computed 12.0 s before for another "
        "request; the rest missed because the text differs at token 1,025 from what is cached.",
        "Prefill of 286 tokens in 3 steps beside 14 decodes: 410 ms, compute-bound at 61 % of "
        "the machine's arithmetic.",
        "97 tokens: 96 steps of 15 sequences after the first token, 21 ms each, memory-bound at "
        "83 % of the machine's bandwidth.",
        "Preempted once: 212 tokens recomputed in 100 ms, 1,000 found in the cache again.",
        "Preempted 120 ms because no blocks were free.",
        "14 ms between steps: planning, text, messages.",
        "Ended after 3.0 s in the engine: length.",
    ]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lookup(0, CacheMiss.DIFFERS), "differs at token 1 "),
        (lookup(0, CacheMiss.ENDS), "nothing that begins like it"),
        (lookup(0, CacheMiss.TOO_SHORT), "one token is too short"),
        (lookup(0, CacheMiss.NOT_ASKED), "all rows of the prompt"),
        (lookup(0, CacheMiss.OFF), "prefix caching is off"),
        (lookup(0, CacheMiss.EVICTED, evicted_at=90.34), "evicted 10.0 s before"),
        (lookup(7, CacheMiss.ENDS, num_sources=1, oldest=1.0, newest=1.0), "goes on from there"),
        (lookup(9, CacheMiss.NOTHING, num_sources=3, oldest=40.34, newest=98.34), "all but the"),
        (lookup(9, CacheMiss.NOTHING, num_sources=3, oldest=40.34, newest=98.34), "for 3 others"),
        (
            lookup(9, CacheMiss.NOTHING, num_sources=3, oldest=40.34, newest=98.34),
            "2.0 s to 1.0 min before",
        ),
        (lookup(0, CacheMiss.ENDS, is_salted=True), "own cache salt"),
    ],
)
def test_each_outcome_of_a_lookup_has_its_words(found: CacheLookup, words: str) -> None:
    assert words in " ".join(explain(life(cache=found)))


@pytest.mark.parametrize("miss", CacheMiss)
def test_every_miss_has_words(miss: CacheMiss) -> None:
    found = lookup(1, miss, num_sources=1, oldest=1.0, newest=1.0, evicted_at=2.0)
    assert all(line.endswith(".") for line in explain(life(cache=found)))


def test_request_that_runs_goes_on() -> None:
    assert explain(life(finish_reason=None))[-1].startswith("It goes on, after 3.0 s")


def test_step_that_no_model_priced_claims_no_limit() -> None:
    told = explain(life(Part(name="decode", seconds=1.0, work=work(96, 96, 1.0))))
    assert "bound" not in " ".join(told)


def test_steps_of_overhead_are_told_as_such() -> None:
    part = Part(name="decode", seconds=1.0, work=work(96, 96, 1.0, "overhead", 0.12))
    assert "bound by overhead, at 12 % of the machine's limits" in " ".join(explain(life(part)))


def test_pooled_request_tells_of_no_tokens() -> None:
    assert not any("97" in line for line in explain(life(is_pooled=True)))


def test_reason_without_words_is_told_as_it_is() -> None:
    assert because("moonlight") == "because of moonlight"
    assert what(Part(name="queued", reason="moonlight")) == "queued because of moonlight"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.00012, "0.1 ms"), (0.34, "340 ms"), (2.34, "2.3 s"), (90, "1.5 min"), (9000, "2.5 h")],
)
def test_durations_have_two_or_three_digits(seconds: float, told: str) -> None:
    assert duration(seconds) == told
