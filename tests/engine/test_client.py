"""The two clients: the same streams, the same errors, and what a lost engine means."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.client import ClientBase, EngineState, ThreadClient
from octavo.engine.messages import Expecting
from octavo.engine.outputs import OutputDelta
from octavo.engine.supervisor import ChildClient
from octavo.errors import (
    BadRequestError,
    ContextLengthError,
    EngineDeadError,
    InvalidParameterError,
    ModelNotFoundError,
    OctavoError,
    PoolTooSmallError,
    RetryLaterError,
    SettingError,
)
from octavo.native import library
from octavo.request import SamplingParams, StructuredOutputs
from tests.engines import TINY, greedy, only, tiny

PATIENCE = 60.0
both = pytest.mark.parametrize("kind", [ThreadClient, ChildClient])
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="signals a process by /proc's rules")


def config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 128, "block_size": 16}
    if library is not None:
        defaults["num_threads"] = 1
    return EngineConfig.from_dict({"model": str(TINY / "llama"), **defaults, **settings})


@asynccontextmanager
async def running(kind: type[ClientBase], **settings: Any) -> AsyncIterator[Any]:
    client: Any = kind(config(**settings))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def text_of(client: Any, prompt: Any, params: SamplingParams, name: str = "a") -> str:
    request = await client.prepare(prompt, params, request_id=name)
    stream = await client.generate(request)
    return "".join([d.text async for d in stream if isinstance(d, OutputDelta)])


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@both
def test_client_gives_what_the_engine_gives(kind: type[ClientBase]) -> None:
    with tiny(block_size=16) as llm:
        expected = [only(llm, prompt, greedy(12)).text for prompt in ("The sky", "A lake")]

    async def main() -> None:
        async with running(kind) as client:
            found = await asyncio.gather(
                text_of(client, "The sky", greedy(12), "a"),
                text_of(client, "A lake", greedy(12), "b"),
            )
            assert list(found) == expected
            assert client.status.is_ready
            assert client.stats().num_running == 0
            assert client.stats().outlook.chunk_tokens > 0

    asyncio.run(main())


@both
def test_refusal_has_its_type_before_or_after_it_crosses(kind: type[ClientBase]) -> None:
    async def main() -> None:
        async with running(kind, num_gpu_blocks_override=4, max_model_len=1000) as client:
            for params, error in (
                (greedy(8, stop_token_ids=[10**9]), InvalidParameterError),
                (greedy(2000), ContextLengthError),
                (greedy(8, n=65), InvalidParameterError),  # these two are the scheduler's
                (greedy(500), PoolTooSmallError),
            ):
                with pytest.raises(error):
                    await text_of(client, "x", params)
            assert await text_of(client, "x", greedy(4))

    asyncio.run(main())


def test_request_that_no_message_can_hold_is_refused_and_leaves_nothing() -> None:
    async def main() -> None:
        async with running(ChildClient) as client:
            schema = StructuredOutputs(json={"const": 2**70})
            with pytest.raises(BadRequestError, match="cannot be told"):
                await text_of(client, "x", greedy(8, structured_outputs=schema))
            assert client.status.silent_seconds == 0, "nothing is waited for"
            assert await text_of(client, "x", greedy(4))

    asyncio.run(main())


@both
def test_closed_stream_aborts_its_request(kind: type[ClientBase]) -> None:
    async def main() -> None:
        async with running(kind) as client:
            request = await client.prepare("x", greedy(900), request_id="a")
            stream = await client.generate(request)
            await anext(stream)
            stream.close()
            stream.close()
            assert [item async for item in stream] == []
            await until(lambda: client.stats().num_used_blocks == 0)
            assert await text_of(client, "x", greedy(4)), "its id is free again"

    asyncio.run(main())


@both
def test_life_is_told_while_a_request_runs_and_with_the_step_that_ends_it(
    kind: type[ClientBase],
) -> None:
    async def main() -> None:
        async with running(kind, num_gpu_blocks_override=4096) as client:
            ended: list[Any] = []
            client.observe(lambda step: ended.extend(step.lives) if step else None)
            request = await client.prepare("The sky", greedy(900, n=32), request_id="a")
            stream = await client.generate(request)
            await anext(stream)
            life = await client.life_of("a")
            assert (life.finish_reason, life.num_samples) == (None, 32)
            stream.close()
            await until(lambda: ended)
            (life,) = ended
            assert (life.request_id, life.finish_reason) == ("a", "abort")
            assert sum(p.seconds for p in life.parts) == pytest.approx(
                life.until - life.arrival_time
            )
            assert await client.life_of("a") is None
            assert await client.life_of("never") is None

    asyncio.run(main())


@on_linux
def test_engine_that_dies_while_it_is_asked_for_a_life_leaves_nobody_waiting() -> None:
    async def main() -> None:
        async with running(ChildClient) as client:
            os.kill(client.pid, signal.SIGSTOP)
            asked = asyncio.create_task(client.life_of("a"))
            await asyncio.sleep(0)
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                assert await asked is None

    asyncio.run(main())


@both
def test_id_in_use_is_refused(kind: type[ClientBase]) -> None:
    async def main() -> None:
        async with running(kind) as client:
            request = await client.prepare("x", greedy(900), request_id="a")
            stream = await client.generate(request)
            with pytest.raises(InvalidParameterError, match="request_id"):
                await client.generate(request)
            stream.close()

    asyncio.run(main())


@both
def test_client_that_is_closed_takes_no_requests(kind: type[ClientBase]) -> None:
    async def main() -> None:
        async with running(kind) as client:
            request = await client.prepare("x", greedy(900), request_id="a")
            stream = await client.generate(request)
            await client.close()
            with pytest.raises(OctavoError, match="closed"):
                _ = [item async for item in stream]
            with pytest.raises(RetryLaterError):
                await client.generate(request)

    asyncio.run(main())


@both
def test_engine_that_cannot_start_says_why(kind: type[ClientBase]) -> None:
    async def main() -> None:
        client: Any = kind(config(max_model_len=10**6))
        with pytest.raises(SettingError, match="max_model_len"):
            await client.start()
        await client.close()

    asyncio.run(main())


def test_model_that_is_not_there_is_told_before_a_process_starts() -> None:
    with pytest.raises(ModelNotFoundError):
        ChildClient(config(model="no-such-model"))


# --- the child ----------------------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_engine_ends_each_stream_once_and_is_replaced(number: signal.Signals) -> None:
    async def main() -> None:
        client = ChildClient(config(), step_timeout=0.3)
        await client.start()
        try:
            streams = []
            for name in "abc":
                request = await client.prepare("x", greedy(900), request_id=name)
                streams.append(await client.generate(request))
            old = client.pid
            assert old is not None
            os.kill(old, number)
            for stream in streams:
                with pytest.raises(EngineDeadError) as caught:
                    _ = [item async for item in stream]
                assert caught.value.retry_after is not None
                with pytest.raises(EngineDeadError):
                    await anext(stream)
            assert client.status.state is EngineState.RESTARTING
            with pytest.raises(RetryLaterError):
                await text_of(client, "x", greedy(4))
            await until(lambda: client.status.is_ready)
            assert client.pid != old
            with pytest.raises(ProcessLookupError):
                os.kill(old, 0)  # it was reaped
            assert await text_of(client, "x", greedy(4))
            assert client.num_restarts == 1
        finally:
            await client.close()

    asyncio.run(main())


@on_linux
def test_silence_in_a_step_that_was_announced_as_long_is_no_hang() -> None:
    async def main() -> None:
        client = ChildClient(config(), step_timeout=0.5)
        await client.start()
        try:
            stream = await client.generate(await client.prepare("x", greedy(900), request_id="a"))
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)  # what it sent before is read
            client._take(Expecting(100.0))
            await asyncio.sleep(1.2)  # longer than the limit, and than some looks of the watch
            assert client.num_restarts == 0
            assert client.status.is_ready
            os.kill(client.pid, signal.SIGCONT)
            assert [item async for item in stream]
            # The step is over: the next silence is judged by the timeout again.
            assert client._longest_silence < 100
        finally:
            await client.close()

    asyncio.run(main())


@on_linux
def test_idle_engine_is_not_taken_for_a_hung_one() -> None:
    async def main() -> None:
        client = ChildClient(config(), step_timeout=0.05)
        await client.start()
        try:
            await text_of(client, "x", greedy(4))
            await asyncio.sleep(0.6)  # more than two looks of the watch
            assert client.num_restarts == 0
            assert client.status.silent_seconds == 0
        finally:
            await client.close()

    asyncio.run(main())
