"""Lives over HTTP: who may ask, what is told while and after a request runs, and for how long."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.lives import Life
from octavo.errors import RequestNotFoundError, SettingError
from octavo.server.keys import ANYBODY, Caller
from octavo.server.records import MAX_PROMPTS, Records
from tests.server.serving import (
    PATIENCE,
    Calls,
    ProcessServer,
    ThreadServer,
    chat,
    checked,
    completion,
    engine_config,
    read_events,
)
from tests.server.test_process import is_ready, wait_for
from tests.server.test_staying_up import block, leave, until, until_idle

PATH = "/v1/completions"


def explained(calls: Calls, request_id: str, **options: Any) -> dict[str, Any]:
    """Return a request's explanation, whose parts must add up."""
    told = checked(calls.get(f"/v1/requests/{request_id}/explain", **options))
    for each in [told, *told.get("prompts", ())]:
        seconds = sum(part["seconds"] for part in each["parts"])
        assert seconds == pytest.approx(each["wall_seconds"], abs=1e-6)
        assert all(part["seconds"] > -1e-6 for part in each["parts"]), each["parts"]
    return told


def names(told: dict[str, Any]) -> list[str]:
    return [part["name"] for part in told["parts"]]


# --- what is told -------------------------------------------------------------------------------


def test_ended_request_is_explained_by_either_of_its_ids(calls: Calls) -> None:
    headers = {"x-request-id": "mine-1"}
    checked(calls.post(PATH, json=completion([7] * 40, max_tokens=5), headers=headers))
    told = explained(calls, "mine-1")
    assert told == explained(calls, "cmpl-mine-1")
    assert told["status"] == "ended"
    assert told["finish_reason"] == "length"
    assert (told["prompt_tokens"], told["generated_tokens"]) == (40, 5)
    assert names(told)[0] == "handover"
    assert names(told)[-1] == "reply"
    assert {"prefill", "decode", "between"} < set(names(told))
    decode = next(part for part in told["parts"] if part["name"] == "decode")
    assert decode["steps"] == 4
    assert any(line.startswith("5 tokens: 4 steps") for line in told["summary"])


def test_wall_time_is_what_the_log_tells(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "octavo.server"):
        headers = {"x-request-id": "timed"}
        calls.post("/v1/chat/completions", json=chat(), headers=headers)
    (line,) = [r.getMessage() for r in caplog.records if "chat/completions" in r.getMessage()]
    seconds = float(line.partition("seconds=")[2].split()[0])
    # The route is a part of what the line counts, and all but a moment of it.
    assert 0 < explained(calls, "timed")["wall_seconds"] <= seconds + 0.001


def test_cache_is_told_in_numbers_and_words(calls: Calls) -> None:
    prompt = [11, 12, 13, 14] * 10
    calls.complete(prompt)
    checked(calls.post(PATH, json=completion([*prompt, 9]), headers={"x-request-id": "hit"}))
    differs = [*prompt[:37], 99, 98, 97]
    checked(calls.post(PATH, json=completion(differs), headers={"x-request-id": "miss"}))
    hit, miss = explained(calls, "hit"), explained(calls, "miss")
    assert hit["cache"]["cached_tokens"] == 40
    assert hit["cache"]["newest_seconds"] >= 0
    assert miss["cache"] | {"cached_tokens": 37, "miss": "differs"} == miss["cache"]
    assert any("differs at token 38" in line for line in miss["summary"])


def test_text_and_tokens_of_requests_are_never_told(calls: Calls) -> None:
    headers = {"x-request-id": "private"}
    fields = completion("a secret place", stop=["hidden"], cache_salt="mysalt", max_tokens=6)
    generated = checked(calls.post(PATH, json=fields, headers=headers))["choices"][0]["text"]
    text = json.dumps(explained(calls, "private"))
    for secret in ("secret", "hidden", "mysalt", json.dumps(generated)[1:-1]):
        assert secret not in text


def test_salted_request_learns_nothing_of_the_same_prompt_of_others(calls: Calls) -> None:
    prompt = list(range(60, 110))
    calls.complete(prompt, cache_salt="theirs")
    headers = {"x-request-id": "salted"}
    checked(calls.post(PATH, json=completion(prompt, cache_salt="mine"), headers=headers))
    told = explained(calls, "salted")
    assert told["cache"]["miss"] == "ends"
    assert told["cache"]["cached_tokens"] == 0
    assert any("own cache salt" in line for line in told["summary"])


def test_several_prompts_are_told_apart(calls: Calls) -> None:
    headers = {"x-request-id": "several"}
    prompts = [[i] * 20 for i in range(3)]
    checked(calls.post(PATH, json=completion(prompts), headers=headers))
    told = explained(calls, "several")
    assert [p["prompt_tokens"] for p in told["prompts"]] == [20, 20, 20]
    assert told["summary"][0] == "One of 3 prompts; this one took longest."
    assert told["wall_seconds"] == max(p["wall_seconds"] for p in told["prompts"])


def test_of_many_inputs_the_first_are_told(calls: Calls) -> None:
    headers = {"x-request-id": "many"}
    body = {"input": [[i] * 3 for i in range(MAX_PROMPTS + 4)]}
    checked(calls.post("/v1/embeddings", json=body, headers=headers))
    told = explained(calls, "many")
    assert len(told["prompts"]) == MAX_PROMPTS
    assert f"{MAX_PROMPTS + 4} prompts, of which {MAX_PROMPTS} are told" in told["summary"][0]


# --- requests that did not end well -------------------------------------------------------------


class Metered:
    """An executor that takes a permit for each step."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.permits = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, batch: Any) -> Any:
        assert self.permits.acquire(timeout=PATIENCE)
        return self._inner.submit(batch)


def test_running_request_is_told_so_far() -> None:
    headers, fields = {"x-request-id": "runs"}, completion(max_tokens=900, stream=True)
    with ThreadServer() as server, server.calls() as calls, server.calls() as other:
        metered = server.engine.executor = Metered(server.engine.executor)
        metered.permits.release(3)
        with (
            calls.stream("POST", PATH, json=fields, headers=headers) as reply,
            ThreadPoolExecutor(1) as pool,
        ):
            events = read_events(reply)  # kept, for the reply is given up with it
            next(events)
            asked = pool.submit(explained, other, "runs")
            while not wait([asked], timeout=0.02).done:
                metered.permits.release()  # the engine answers between two steps
            told = asked.result()
            del events
        metered.permits.release(1000)
        until_idle(server)
    assert told["status"] == "running"
    assert told["finish_reason"] is None
    assert 0 < told["generated_tokens"] < 900
    assert told["summary"][-1].startswith("It goes on")
    assert names(told)[-1] != "reply"


def test_client_that_left_is_told() -> None:
    with ThreadServer() as server, server.calls() as calls:
        gate = block(server)
        leave(completion(max_tokens=900), server)
        gate.open.set()
        until_idle(server)
        (request_id,) = server.service.records._by_id
        told = explained(calls, request_id)
        assert told["finish_reason"] == "abort"
        assert "client goes away" in told["summary"][-1]


def test_request_beyond_its_deadline_is_told_with_the_limit() -> None:
    with ThreadServer() as server, server.calls() as calls:
        gate = block(server)
        fields = completion(timeout=0.05)
        reply = calls.post(PATH, json=fields, headers={"x-request-id": "late"})
        assert reply.status_code == 504
        gate.open.set()
        until_idle(server)
        told = explained(calls, "late")
        assert told["finish_reason"] == "abort"
        assert "did not finish within its 0.05 s" in told["summary"][-1]


def test_request_that_the_engine_refuses_never_ran() -> None:
    config = engine_config(num_gpu_blocks_override=4, max_model_len=1000)
    with ThreadServer(config) as server, server.calls() as calls:
        headers = {"x-request-id": "large"}
        reply = calls.post(PATH, json=completion(max_tokens=500), headers=headers)
        assert reply.status_code == 400
        told = explained(calls, "large")
        assert told["status"] == "ended"
        assert told["summary"] == ["It never ran: the engine did not take it."]
        assert not server.service.records._living


def test_refused_request_says_why() -> None:
    config = engine_config(max_num_seqs=1, max_num_batched_tokens=64)
    with ThreadServer(config, max_waiting_requests=1) as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(calls.post, PATH, json=completion()) for _ in range(2)]
            until(server, lambda: server.service.admission.num_open == 2)
            reply = calls.post(PATH, json=completion(), headers={"x-request-id": "surplus"})
            assert reply.status_code == 429
            told = explained(calls, "surplus")
            gate.open.set()
            assert all(each.result().status_code == 200 for each in waiting)
    assert told["status"] == "refused"
    assert "The server is busy" in told["summary"][0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_request_whose_engine_died_is_told_and_those_before_it_too() -> None:
    with ProcessServer() as server, server.calls() as calls:
        checked(calls.post(PATH, json=completion(), headers={"x-request-id": "before"}))
        fields, headers = completion(max_tokens=1000, stream=True), {"x-request-id": "dies"}
        with calls.stream("POST", PATH, json=fields, headers=headers) as reply:
            events = read_events(reply)
            next(events)
            os.kill(server.child, signal.SIGKILL)
            *_, last = events
            assert json.loads(last)["error"]["code"] == "engine_dead"
        wait_for(lambda: is_ready(calls), "the engine comes back")
        told = explained(calls, "dies")
        assert told["status"] == "lost"
        assert "engine died" in told["summary"][0]
        assert explained(calls, "before")["status"] == "ended"


# --- who may ask --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("anna\nbert\nmonitor read\nroot admin\n")
    with ThreadServer(api_key_file=str(path)) as server:
        yield server


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


def test_only_the_key_that_sent_a_request_and_admins_may_ask(keyed: ThreadServer) -> None:
    with keyed.calls() as calls:
        headers = bearer("anna", **{"x-request-id": "annas"})
        checked(calls.post(PATH, json=completion(), headers=headers))
        asked = {
            key: calls.get("/v1/requests/annas/explain", headers=bearer(key))
            for key in ("anna", "root", "bert", "monitor", "nobody")
        }
        assert {key: reply.status_code for key, reply in asked.items()} == {
            "anna": 200,
            "root": 200,
            "bert": 404,
            "monitor": 403,
            "nobody": 401,
        }
        unknown = calls.get("/v1/requests/nones/explain", headers=bearer("bert"))
        seen = asked["bert"].json()["error"]["message"].replace("annas", "nones")
        assert unknown.json()["error"]["message"] == seen, "whether it exists is not told"


def test_id_that_two_keys_chose_shows_each_its_own(keyed: ThreadServer) -> None:
    with keyed.calls() as calls:
        for key, length in (("anna", 10), ("bert", 20)):
            headers = bearer(key, **{"x-request-id": "same"})
            checked(calls.post(PATH, json=completion([5] * length), headers=headers))
        for key, length in (("anna", 10), ("bert", 20), ("root", 20)):
            told = explained(calls, "same", headers=bearer(key))
            assert told["prompt_tokens"] == length, key


@pytest.mark.parametrize("request_id", ["none", "a/b", "x" * 500, "%00", "é", "..%2Fmodels"])
def test_unknown_id_is_404_with_how_many_are_kept_and_how_long(
    calls: Calls, request_id: str
) -> None:
    reply = calls.get(f"/v1/requests/{request_id}/explain")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "request_not_found"
    assert "1,000" in error["message"]
    assert "3,600 s" in error["message"]
    assert len(error["message"]) < 1000


def test_server_that_records_nothing_says_so() -> None:
    with ThreadServer(engine_config(explain_max_requests=0)) as server, server.calls() as calls:
        checked(calls.post(PATH, json=completion(), headers={"x-request-id": "gone"}))
        error = checked_404(calls, "gone")
        assert "--explain-max-requests 0" in error
        assert len(server.service.records) == 0


def test_only_the_latest_requests_are_kept() -> None:
    with ThreadServer(engine_config(explain_max_requests=2)) as server, server.calls() as calls:
        for number in range(4):
            headers = {"x-request-id": f"r{number}"}
            checked(calls.post(PATH, json=completion(), headers=headers))
        assert explained(calls, "r3")["id"] == "cmpl-r3"
        assert "the last 2 that ended" in checked_404(calls, "r1")
        assert len(server.service.records) == 2
        assert not server.service.records._living


def checked_404(calls: Calls, request_id: str) -> str:
    reply = calls.get(f"/v1/requests/{request_id}/explain")
    assert reply.status_code == 404, reply.text
    message: str = reply.json()["error"]["message"]
    return message


# --- the records themselves ---------------------------------------------------------------------


class Clock:
    """Seconds that pass when somebody says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def end_one(records: Records, name: str, caller: Caller = ANYBODY) -> None:
    record = records.begin(name, caller)
    records.close(record, records.open(record, f"{name}-0"), "")


def test_record_is_gone_after_its_time() -> None:
    clock = Clock()
    records = Records(10, 60.0, clock)
    end_one(records, "a")
    clock.now = 59.0
    assert records.find("a", ANYBODY).id == "a"
    clock.now = 61.0
    with pytest.raises(RequestNotFoundError, match="60 s"):
        records.find("a", ANYBODY)
    assert len(records) == 0


def test_refused_requests_push_out_no_ended_ones() -> None:
    records = Records(2, 60.0, Clock())
    end_one(records, "a")
    for number in range(5):
        records.refuse(records.begin(f"r{number}", ANYBODY), "busy")
    assert records.find("a", ANYBODY).ended_at is not None
    assert records.find("r4", ANYBODY).refused == "busy"
    assert len(records) == 3


def test_life_that_comes_after_its_record_is_gone_is_dropped() -> None:
    records = Records(1, 60.0, Clock())
    end_one(records, "a")
    end_one(records, "b")
    records.take([_life("a-0"), _life("b-0")])
    assert records.find("b", ANYBODY).prompts[0].life == _life("b-0")
    assert not records._living


def test_request_whose_prompts_come_one_by_one_has_one_record() -> None:
    records = Records(1, 60.0, Clock())
    record = records.begin("a", ANYBODY)
    for number in range(3):
        records.close(record, records.open(record, f"a-{number}"), "")
    assert len(records.find("a", ANYBODY).prompts) == 3
    assert len(records) == 1


def test_prompt_refused_beside_others_leaves_the_record_to_them() -> None:
    records = Records(5, 60.0, Clock())
    record = records.begin("a", ANYBODY)
    records.refuse(record, "busy")
    prompt = records.open(record, "a-0")
    records.refuse(record, "busy")
    records.close(record, prompt, "")
    assert len(records.find("a", ANYBODY).prompts) == 1
    assert len(records) == 1


def _life(request_id: str) -> Life:
    return Life(
        request_id=request_id,
        arrival_time=0.0,
        until=1.0,
        num_prompt_tokens=1,
        num_samples=1,
        is_pooled=False,
        parts=(),
    )


@pytest.mark.parametrize(
    ("config", "name"), [(EngineConfig, "explain_max_requests"), (ServerConfig, "explain_seconds")]
)
def test_settings_below_zero_are_refused(config: Any, name: str) -> None:
    with pytest.raises(SettingError, match=f"{name} must be at least 0"):
        config.from_dict({name: -1})


def test_key_file_is_what_decides_who_is_who(tmp_path: Path) -> None:
    assert ANYBODY.may_see(ANYBODY)
    assert not Caller(b"a").may_see(Caller(b"b"))
    assert Caller(b"a", is_admin=True).may_see(Caller(b"b"))
