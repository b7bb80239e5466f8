"""The law's cells as tests: all of them for one model, the most telling ones for the others.

`make law` runs every cell of every model, in every format of pages, on every instruction set.
"""

from functools import cache

import pytest

from tests import law
from tests.engines import TINY

TELLING = (
    "among 31 others",
    "chunks of 7",
    "chunks by time",
    "preempted",
    "warm, other lengths",
    "blocks of 64",
)
FEW = ("chunks of 7", "preempted", "warm, next turn")
BEST, *LESSER = law.INSTRUCTION_SETS or ["reference"]
CELLS = [
    *(("llama", BEST, "bfloat16", cell) for cell in law.CELLS),
    *(("llama", BEST, kv_format, cell) for kv_format in ("float32", "int8") for cell in TELLING),
    *((model, BEST, "bfloat16", cell) for model in law.MODELS[1:] for cell in FEW),
    *(("gemma3", BEST, "bfloat16", cell) for cell in ("forked", "among 31 others")),
    *(("llama", isa, "bfloat16", cell) for isa in LESSER for cell in (*TELLING, "on 2 threads")),
]
if law.INSTRUCTION_SETS:
    CELLS += [("llama", BEST, "bfloat16", cell) for cell in law.NATIVE_CELLS]
    CELLS += [("llama", "reference", "bfloat16", cell) for cell in TELLING]
    CELLS += [("llama", "reference", "int8", cell) for cell in FEW]
    CELLS += [("gemma3", "reference", "float32", cell) for cell in FEW if cell != "preempted"]


def base(executor, kv_format):
    settings = law.REFERENCE if executor == "reference" else law.native(executor)
    return {**law.PLAIN, **settings, "kv_cache_dtype": kv_format}


@cache
def expected(model, executor, kv_format):
    """What each subject says alone, on a cold engine."""
    return law.alone(str(TINY / model), base(executor, kv_format))


@pytest.mark.case("V02")
@pytest.mark.case("V17")
@pytest.mark.case("S26")
@pytest.mark.case("S27")
@pytest.mark.parametrize(("model", "executor", "kv_format", "cell"), CELLS)
def test_the_same_request_gives_the_same_bits(model, executor, kv_format, cell):
    alone = expected(model, executor, kv_format)
    assert law.check(str(TINY / model), base(executor, kv_format), cell, alone) == 0


def test_the_law_sees_a_single_bit_in_a_token_or_a_logprob():
    (numbers, *_) = expected("llama", BEST, "bfloat16")
    assert law.differing_bits(numbers, numbers) == 0
    for change in ((numbers[3][0] ^ 1, numbers[3][1]), (numbers[3][0], -numbers[3][1] or 5e-324)):
        assert law.differing_bits(numbers, [*numbers[:3], change, *numbers[4:]]) > 0
    assert law.differing_bits(numbers, numbers[:-1]) == 64


def test_subjects_cover_what_the_law_promises():
    subjects = law.subjects()
    lengths = [len(subject.prompt["prompt_token_ids"]) for subject in subjects]
    params = [subject.params for subject in subjects]
    assert min(lengths) == 1
    assert max(lengths) > 256
    assert any(length % 32 and length > 32 for length in lengths)
    assert {p.temperature == 0 for p in params} == {True, False}
    assert any(p.needs_history for p in params)
    assert any(p.prompt_logprobs is not None for p in params)
    assert any(p.n > 1 for p in params)
    assert all(p.logprobs for p in params)


def test_a_cell_that_does_not_do_what_it_says_fails():
    """A pool without a prefix cache cannot be warm."""
    with pytest.raises(AssertionError, match="0 cached"):
        law.CELLS["warm"](
            str(TINY / "llama"), {**base(BEST, "bfloat16"), "enable_prefix_caching": False}
        )
