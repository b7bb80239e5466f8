"""What crosses between server and engine comes out as it went in."""

from typing import Any

import pytest

from octavo.core.lookup import CacheLookup, CacheMiss
from octavo.engine.frames import HEADER_BYTES, FrameBuffer
from octavo.engine.lives import Life, Part, Work
from octavo.engine.messages import (
    Abort,
    Add,
    Answered,
    AskLife,
    LifeTold,
    Stepped,
    decode_command,
    decode_event,
    encode,
)
from octavo.engine.outputs import OutputDelta, PromptProgress
from octavo.errors import (
    BadRequestError,
    ContextLengthError,
    InvalidParameterError,
    OctavoError,
    RetryLaterError,
)
from octavo.request import Logprob, RequestMetrics, SamplingParams, StructuredOutputs


def content(frame: bytes) -> bytes:
    assert int.from_bytes(frame[:HEADER_BYTES], "little") == len(frame) - HEADER_BYTES
    return frame[HEADER_BYTES:]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(stop="a", seed=-(2**63), logit_bias={5: -1.5}),
        SamplingParams(stop=["a", "\U0001f336"], stop_token_ids=[1], allowed_token_ids=[2, 3]),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", "x": [1.5]})),
        SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])),
    ],
    ids=repr,
)
def test_command_survives_the_wire(params: SamplingParams) -> None:
    command = Add("id", [1, 2, 3], params, -7, "salt")
    assert decode_command(content(encode(command))) == command


def test_step_survives_the_wire() -> None:
    delta = OutputDelta(
        request_id="a",
        index=1,
        text="\U0001f336",
        token_ids=[5],
        logprobs=[{5: Logprob(-0.5, 1, "x"), 6: Logprob(float("-inf"), 2, None)}],
        finish_reason="stop",
        stop_reason="x",
        is_last=True,
        prompt_logprobs=[None, {3: Logprob(-1.0)}],
        metrics=RequestMetrics(arrival_time=1.5, num_preemptions=2),
    )
    event = Stepped(0.25, [delta], [PromptProgress("b", 5, 2)])
    assert decode_event(content(encode(event))) == event


def test_life_survives_the_wire() -> None:
    life = Life(
        request_id="a",
        arrival_time=1.5,
        until=2.5,
        num_prompt_tokens=9,
        num_samples=1,
        is_pooled=False,
        parts=(
            Part(name="queued", reason="blocks", seconds=0.25),
            Part(name="decode", seconds=0.75, work=Work(3, 0.75, 9, 1e9, 1e8, 0.5, 0.0, 0.75)),
        ),
        admitted_at=1.75,
        cache=CacheLookup(num_tokens=8, miss=CacheMiss.EVICTED, oldest=1.0, evicted_at=1.25),
    )
    for event in (Stepped(0.25, [], [], None, [life]), LifeTold("a", life), LifeTold("b", None)):
        assert decode_event(content(encode(event))) == event
    asked = AskLife("a")
    assert decode_command(content(encode(asked))) == asked


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameterError("top_p", 2, "a number"),
        ContextLengthError("too long", num_prompt_tokens=5, max_tokens=None, limit=4),
        RetryLaterError("later", 2.5),
        BadRequestError("no"),
    ],
    ids=repr,
)
def test_error_keeps_its_type_message_and_attributes(error: OctavoError) -> None:
    event = decode_event(content(encode(Answered([], [("a", error)]))))
    assert isinstance(event, Answered)
    ((_, found),) = event.refused
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError()], ids=repr)
def test_error_of_another_kind_becomes_one_of_ours(error: Exception) -> None:
    event = decode_event(content(encode(Answered([], [("a", error)]))))
    assert isinstance(event, Answered)
    ((_, found),) = event.refused
    assert type(found) is OctavoError
    assert str(found).startswith(type(error).__name__)


def test_name_in_an_error_cannot_pick_a_class_of_another_module() -> None:
    class Path(Exception):  # noqa: N818 (the name of something that errors.py does not define)
        pass

    event: Any = decode_event(content(encode(Answered([], [("a", Path("x"))]))))
    assert type(event.refused[0][1]) is OctavoError


def test_frames_are_found_at_every_cut() -> None:
    frames = [encode(Abort("a" * length)) for length in (0, 1, 300)]
    stream = b"".join(frames)
    expected = [content(frame) for frame in frames]
    for size in range(1, len(stream) + 1):
        buffer = FrameBuffer()
        found = []
        for start in range(0, len(stream), size):
            found += buffer.push(stream[start : start + size])
        assert found == expected
