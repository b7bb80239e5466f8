"""The server over many requests: memory stays flat, and nothing is left open."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import PATIENCE, ProcessServer, completion
from tests.server.test_process import pytestmark as on_linux
from tests.server.test_process import wait_for

pytestmark = on_linux
NUM_REQUESTS, NUM_CLIENTS, EVERY = 20_000, 8, 1_000


def pss_mib(pid: int) -> float:
    """Return a process's share of memory: its pages, those it shares divided by their users."""
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def short_request(chance: random.Random) -> dict[str, Any]:
    length = chance.randint(1, 48)
    prompt = [chance.randrange(256) for _ in range(length)]
    options: dict[str, Any] = chance.choice(
        [
            {},
            {"stream": True},
            {"n": 2, "temperature": 1.0},
            {"logprobs": 2},
            {"stop": ["a"]},
            {"structured_outputs": {"choice": ["x", "yy"]}, "ignore_eos": False},
            {"stop_token_ids": [10**6]},
        ]
    )
    return completion(prompt, max_tokens=chance.randint(1, 8), **options)


@pytest.mark.slow
def test_memory_stays_flat_over_20_000_short_requests() -> None:
    with ProcessServer("--num-gpu-blocks-override", "256") as server, server.calls() as calls:

        def client(seed: int) -> None:
            chance = random.Random(seed)
            with server.calls() as own:
                for _ in range(EVERY // NUM_CLIENTS):
                    reply = own.post("/v1/completions", json=short_request(chance))
                    assert reply.status_code in (200, 400), reply.text

        series = []
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for done in range(0, NUM_REQUESTS, EVERY):
                list(pool.map(client, range(done, done + NUM_CLIENTS), timeout=10 * PATIENCE))
                memory = [pss_mib(server.process.pid), pss_mib(server.child)]
                series.append({"requests": done + EVERY, "server": memory[0], "engine": memory[1]})
        print(json.dumps({"pss_mib": series}))
        wait_for(lambda: calls.get("/load").json()["kv_cache_usage"] == 0, "every block is free")
        load = calls.get("/load").json()
        assert load["server_load"] == load["num_waiting"] == load["num_restarts"] == 0
    # What grows with each request would grow as much in the last half as in the first quarters.
    middle = series[len(series) // 2]
    for process in ("server", "engine"):
        assert series[-1][process] < middle[process] * 1.03 + 2, series
