import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.peers.workers.closed_loop as module
from benchmarks.peers.workers.closed_loop import closed_loop


class Ticks:
    """A clock that a step moves by one second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeEngine:
    """Gives each running request one token per step, `short` tokens too few."""

    def __init__(self, clock, short=0):
        self.clock = clock
        self.short = short
        self.left = {}
        self.most_running = 0
        self.aborted = []

    def add(self, prompt, output_tokens):
        self.left[prompt[0]] = output_tokens - self.short
        return prompt[0]

    def step(self):
        self.clock.now += 1
        self.most_running = max(self.most_running, len(self.left))
        for key in list(self.left):
            self.left[key] -= 1
            yield key, 1, self.left[key] == 0
            if self.left[key] == 0:
                del self.left[key]

    def abort(self, keys):
        self.aborted = keys


def run(num_prompts, streams, output_tokens, limit=100.0, **kinds):
    clock = Ticks()
    engine = FakeEngine(clock, **kinds)
    prompts = [[key] for key in range(num_prompts)]
    return closed_loop(engine, prompts, streams, output_tokens, limit, clock), engine


def test_streams_are_kept_full_until_the_prompts_end():
    seen, engine = run(5, 2, 3)
    assert engine.most_running == 2
    assert seen["seconds"] == 9.0  # 3 rounds of 3 tokens
    assert not seen["cut"]
    assert [answer["tokens"] for answer in seen["answers"]] == [3] * 5
    assert seen["answers"][0] == {"sent": 0.0, "first": 1.0, "last": 3.0, "tokens": 3}
    assert seen["answers"][2]["sent"] == 3.0


def test_more_streams_than_prompts_send_each_prompt_once():
    seen, _ = run(2, 8, 1)
    assert len(seen["answers"]) == 2


def test_at_the_limit_the_rest_is_aborted_and_what_came_counts():
    seen, engine = run(2, 2, 10, limit=4.0)
    assert seen["cut"]
    assert seen["seconds"] == 4.0
    assert [answer["tokens"] for answer in seen["answers"]] == [4, 4]
    assert engine.aborted == [0, 1]


def test_an_answer_that_is_short_is_an_error():
    with pytest.raises(ValueError, match="2 of 3 tokens"):
        run(1, 1, 3, short=1)


def test_a_step_without_tokens_is_no_first_token():
    class Silent(FakeEngine):
        def step(self):
            self.clock.now += 1
            if self.clock.now < 3:
                return [(0, 0, False)]
            return [(0, 1, True)]

    clock = Ticks()
    seen = closed_loop(Silent(clock), [[0]], 1, 1, 100.0, clock)
    assert seen["answers"][0]["first"] == 3.0


WORKER = """
from closed_loop import obey
class Engine:
    def add(self, prompt, output_tokens):
        print("noise of the engine")
        return prompt[0]
    def step(self):
        return [(7, 1, True)]
    def abort(self, keys): pass
obey(lambda: (Engine(), {"name": "fake"}))
"""


def test_a_worker_answers_line_by_line_and_survives_a_wrong_command():
    good = {"prompts": [[7]], "streams": 1, "output_tokens": 1, "limit": 9}
    asked = "\n".join(["{", json.dumps({**good, "output_tokens": 2}), json.dumps(good)])
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=asked,
        capture_output=True,
        text=True,
        cwd=Path(module.__file__).parent,
        check=True,
        timeout=60,
    )
    ready, *replies = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True, "about": {"name": "fake"}}
    assert "JSONDecodeError" in replies[0]["error"]
    assert "1 of 2 tokens" in replies[1]["error"]
    assert replies[2]["answers"][0]["tokens"] == 1
    assert "noise" in done.stderr
