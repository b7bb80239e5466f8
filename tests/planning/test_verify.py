"""Predicted beside measured, on a tiny model that really runs."""

from collections.abc import Iterator

import pytest

from octavo import LLM
from octavo.cost.hardware import assumed_machine
from octavo.cost.steps import StepTimes
from octavo.engine import clock
from octavo.errors import BadRequestError
from octavo.planning.latency import Lengths
from octavo.planning.subject import read_subject
from octavo.planning.verify import VerifiedRow, verify
from tests.engines import TINY, assert_idle, tiny

MACHINE = assumed_machine("some", "generic", 1, 1 << 30)


@pytest.fixture
def llm() -> Iterator[LLM]:
    made = tiny()
    yield made
    made.close()


def steps() -> StepTimes:
    subject = read_subject(str(TINY / "llama"))
    return StepTimes(subject.prepared("group", quantization=None, kv_element=2.0), MACHINE)


def rows(llm: LLM, prompt: int = 20, batches: tuple[int, ...] = (1, 4)) -> list[VerifiedRow]:
    lengths = Lengths(prompt_tokens=prompt, output_tokens=8)
    return verify(llm.engine, steps(), lengths, clock.monotonic, batches=batches)


def test_a_prompt_and_each_batch_are_predicted_and_measured(llm: LLM) -> None:
    found = rows(llm)
    assert [row.batch for row in found] == [0, 1, 4]
    assert all(row.predicted > 0 and row.measured > 0 for row in found)
    assert_idle(llm.engine)


def test_the_error_is_above_zero_where_the_engine_is_faster() -> None:
    row = VerifiedRow(name="decode", batch=1, predicted=0.03, measured=0.02)
    assert row.error == pytest.approx(0.5)


def test_predictions_are_of_the_positions_that_were_run(llm: LLM) -> None:
    model = steps()
    (_, decode) = rows(llm, prompt=20, batches=(1,))
    near, far = (model.of_chunks([(1, context)], 1) for context in (21, 60))  # type: ignore[list-item]
    assert near < decode.predicted < far


def test_batches_that_do_not_fit_are_left_out(llm: LLM) -> None:
    assert [row.batch for row in rows(llm, batches=(1, 4000))] == [0, 1]  # max_num_seqs
    assert [row.batch for row in rows(llm, prompt=60, batches=(1, 48))] == [0, 1]  # the pool


def test_a_prompt_that_does_not_fit_is_an_error_with_the_numbers(llm: LLM) -> None:
    held = llm.engine.intake.max_model_len
    with pytest.raises(BadRequestError, match=rf"A prompt of {held:,} tokens.*holds {held:,}"):
        rows(llm, prompt=held)
