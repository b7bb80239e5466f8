"""Our load generator and the neutral one see the same of the same server, on virtual time."""

import argparse
import asyncio
import importlib.util
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest

from octavo.planning.load.client import Target
from octavo.planning.load.config import LoadConfig
from octavo.planning.load.plan import make_plan
from octavo.planning.load.report import Report
from octavo.planning.load.run import LoadGenerator, connect
from tests.planning.load.fakes import Reply, ScriptedServer, run_virtually

NEUTRAL = Path(__file__).parents[4] / "shared" / "bench" / "load.py"
URL = "http://127.0.0.1:8000"


def uneven(number: int, body: dict[str, Any]) -> Reply:
    """Answers whose delays differ by request and token; every seventh request is refused.

    The warm-up is answered. Every fifth answer is two tokens short.
    """
    drawn = random.Random(number)
    wanted = body["max_tokens"] - 2 * (number % 5 == 4)
    delays = [drawn.uniform(0.1, 2), *(drawn.expovariate(30) for _ in range(wanted - 1))]
    return Reply(delays, status=500 if number % 7 == 6 else 200)


@pytest.fixture
def neutral() -> ModuleType:
    if not NEUTRAL.exists():
        pytest.skip("the neutral load client is not beside the checkout")
    spec = importlib.util.spec_from_file_location("neutral_load", NEUTRAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_neutral(module: ModuleType, socket: Path, **fields: Any) -> dict[str, Any]:
    """What load.py reports, on virtual time and over the socket."""
    settings = {
        "url": URL,
        "path": "/v1/completions",
        "model": "scripted",
        "warm": 1,
        "lo": 1000,
        "hi": 40000,
        "seed": 1,
        "timeout": 600.0,
        "extra": {},
        "label": "",
        "log": "",
        **fields,
    }

    async def main() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        module.time = SimpleNamespace(perf_counter=loop.time)  # type: ignore[attr-defined]
        async with ScriptedServer(uneven).at(socket) as connector:
            module.aiohttp = SimpleNamespace(  # type: ignore[attr-defined]
                ClientTimeout=aiohttp.ClientTimeout,
                ClientSession=aiohttp.ClientSession,
                TCPConnector=lambda **_: connector,
            )
            found: dict[str, Any] = await module.run(argparse.Namespace(**settings))
            return found

    return run_virtually(main)


def run_ours(socket: Path, config: LoadConfig) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        plan = make_plan(config)
        async with (
            ScriptedServer(uneven).at(socket) as connector,
            connect(connector=connector) as client,
        ):
            generator = LoadGenerator(client, Target(url=config.url, model="scripted"))
            await generator.warm_up(plan.warm, plan.prefix)
            run = await generator.run(plan.sessions, config.concurrency)
        return Report(run, {}).as_json()

    return run_virtually(main)


@pytest.mark.parametrize(
    ("streams", "requests", "own", "prefix", "output"),
    [(1, 9, 16, 0, 12), (4, 24, 16, 0, 12), (8, 40, 8, 40, 30), (3, 9, 5, 0, 3)],
)
def test_same_work_gives_the_same_figures(
    neutral: ModuleType,
    tmp_path: Path,
    streams: int,
    requests: int,
    own: int,
    prefix: int,
    output: int,
) -> None:
    theirs = run_neutral(
        neutral,
        tmp_path / "a",
        concurrency=streams,
        requests=requests,
        input=own,
        prefix=prefix,
        output=output,
    )
    ours = run_ours(
        tmp_path / "b",
        LoadConfig(
            concurrency=streams,
            requests=requests,
            prompt_tokens=own,
            shared_prefix=prefix,
            output_tokens=output,
        ),
    )
    assert theirs["failures"] > 0
    assert theirs["short"] > 0
    assert (ours["requests"], ours["failed"], ours["short"]) == (
        theirs["requests"],
        theirs["failures"],
        theirs["short"],
    )
    assert (ours["prompt_tokens"], ours["output_tokens"]) == (
        theirs["in_tokens"],
        theirs["out_tokens"],
    )
    assert ours["seconds"] == pytest.approx(theirs["wall_s"], abs=1e-3)
    assert ours["output_tokens_per_s"] == pytest.approx(theirs["out_tok_s"], abs=0.01)
    assert ours["requests_per_s"] == pytest.approx(theirs["req_s"], abs=1e-3)
    for ours_name, theirs_name in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2e")):
        for rank in (50, 95):
            value = theirs[f"{theirs_name}_p{rank}_ms"]
            assert ours[f"{ours_name}_ms"][f"p{rank}"] == pytest.approx(value, abs=0.01)
    for rank in (50, 95, 99):
        assert ours["itl_ms"][f"p{rank}"] == pytest.approx(theirs[f"gap_p{rank}_ms"], abs=0.01)
