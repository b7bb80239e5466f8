"""A closed loop over an engine in this process, told its work in lines of JSON.

Decides when a request is sent and what is noted of it, alike for every engine that has a step to
call. Needs the standard library alone, since it runs in the environment of each engine.

Invariant: stdout carries one line per command and nothing else; what the engine prints goes to
stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

Answer = dict[str, Any]


class Steppable(Protocol):
    """What the loop needs of an engine."""

    def add(self, prompt: list[int], output_tokens: int) -> Any:
        """Queue a prompt of token ids for an answer of exactly so many; return its key."""
        ...

    def step(self) -> Iterable[tuple[Any, int, bool]]:
        """Run one step; return (key, new tokens, finished) of each request that it advanced."""
        ...

    def abort(self, keys: list[Any]) -> None:
        """Drop these requests: all that it has."""
        ...


def closed_loop(
    engine: Steppable,
    prompts: Iterable[list[int]],
    streams: int,
    output_tokens: int,
    limit: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Keep `streams` requests in flight until all are answered or `limit` seconds have passed.

    Returns {"answers": [{sent, first, last, tokens}], "seconds", "cut"}.
    """
    waiting = iter(prompts)
    running: dict[Any, Answer] = {}
    answers: list[Answer] = []

    def start() -> None:
        for prompt in waiting:
            answer = {"sent": clock(), "first": None, "last": None, "tokens": 0}
            answers.append(answer)
            running[engine.add(prompt, output_tokens)] = answer
            return

    begun = clock()
    for _ in range(streams):
        start()
    while running and clock() - begun < limit:
        for key, new_tokens, finished in engine.step():
            _note(running[key], new_tokens, clock())
            if finished:
                _check_length(running.pop(key), output_tokens)
                start()
    seconds = clock() - begun
    engine.abort(list(running))
    return {"answers": answers, "seconds": seconds, "cut": bool(running)}


def _note(answer: Answer, new_tokens: int, now: float) -> None:
    if new_tokens:
        answer["first"] = now if answer["first"] is None else answer["first"]
        answer["last"] = now
        answer["tokens"] += new_tokens


def _check_length(answer: Answer, output_tokens: int) -> None:
    if answer["tokens"] != output_tokens:
        raise ValueError(f"an answer has {answer['tokens']} of {output_tokens} tokens")


def obey(open_engine: Callable[[], tuple[Steppable, dict[str, Any]]]) -> None:
    """Open an engine, say so, and run what stdin asks until it ends.

    open_engine: returns the engine and what to tell of it. A command is the arguments of
    `closed_loop` as an object; the reply is what it returns, or {"error": ...}.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, about = open_engine()
    _reply(replies, {"ready": True, "about": about})
    for line in sys.stdin:
        try:
            _reply(replies, closed_loop(engine, **json.loads(line)))
        except Exception as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _reply(replies: TextIO, values: dict[str, Any]) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()
