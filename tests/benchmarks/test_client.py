import asyncio
from functools import partial

import pytest

from benchmarks.peers.client import ReplyError, is_ready, run_streams
from benchmarks.peers.figures import Seen
from tests.benchmarks.fakes import answer, event, server, token

PROMPTS = [[1], [2], [3]]


def run(script, prompts=PROMPTS, *, streams=2, output_tokens=2, limit=30.0, **kinds) -> Seen:
    async def go() -> Seen:
        async with server(script, **kinds) as port:
            return await run_streams(
                port, "m", prompts, streams=streams, output_tokens=output_tokens, limit=limit
            )

    return asyncio.run(go())


def test_every_prompt_is_asked_once_greedily_and_to_full_length():
    asked = []

    def script(request):
        asked.append(request)
        return answer(request)

    seen = run(script)
    assert sorted(request["prompt"] for request in asked) == PROMPTS
    assert all(request["ignore_eos"] and request["temperature"] == 0 for request in asked)
    assert [one.tokens for one in seen.answers] == [2, 2, 2]
    assert not seen.cut


def test_an_empty_piece_of_text_is_a_token_but_the_end_and_the_count_are_not():
    pieces = [token(""), token("é"), token("", "length"), event({"choices": [], "usage": None})]
    seen = run(lambda request: [*pieces, event("[DONE]")], [[1]], streams=1)
    assert seen.answers[0].tokens == 2


def test_the_servers_count_goes_before_the_number_of_pieces():
    pieces = [token("two tokens"), event({"choices": [], "usage": {"completion_tokens": 2}})]
    assert run(lambda request: pieces, [[1]], streams=1).answers[0].tokens == 2


def test_an_event_may_come_in_parts():
    def script(request):
        whole = b"".join(answer(request))
        return [whole[i : i + 7] for i in range(0, len(whole), 7)]

    assert [one.tokens for one in run(script).answers] == [2, 2, 2]


def test_a_run_at_its_limit_keeps_the_tokens_that_came():
    seen = run(lambda request: [token("x")], [[1], [2]], limit=0.5, hang=True)
    assert seen.cut
    assert [one.tokens for one in seen.answers] == [1, 1]


@pytest.mark.parametrize(
    ("script", "kinds", "told"),
    [
        (lambda request: [b"no such model"], {"status": 404}, "HTTP 404: no such model"),
        (lambda request: [event({"error": "out of memory"})], {}, "out of memory"),
        (lambda request: [token("x")], {}, "1 of 2 tokens"),
        (lambda request: [], {}, "0 of 2 tokens"),
        (lambda request: [event("{")], {}, "no JSON"),
        (answer, {"status": "no number"}, "no HTTP"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(script, kinds, told):
    with pytest.raises(ReplyError, match=told):
        run(script, **kinds)


def test_a_server_is_ready_when_it_answers_with_200_and_not_before():
    async def ask(port, status):
        async with server(lambda request: [], status=status) as listening:
            return await is_ready(port or listening, "/health")

    assert asyncio.run(ask(None, 200))
    assert not asyncio.run(ask(None, 503))
    assert not asyncio.run(partial(ask, 1)(200))  # nobody listens there
