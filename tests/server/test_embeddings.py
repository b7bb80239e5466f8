"""/v1/embeddings: shapes of input and output, lengths, and vectors that depend on nothing else."""

import base64
import json
import struct
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from tests.engines import assert_idle
from tests.server.serving import Calls, ThreadServer, checked, engine_config
from tests.server.test_staying_up import block, leave, until, until_idle

PATH = "/v1/embeddings"


def embed(calls: Calls, given: Any, **fields: Any) -> list[list[float]]:
    """Return the vectors."""
    data = checked(calls.post(PATH, json={"input": given, **fields}))["data"]
    assert [d["index"] for d in data] == list(range(len(data)))
    return [d["embedding"] for d in data]


@pytest.mark.case("S67")
def test_all_four_shapes_of_input_give_the_same_vectors(calls: Calls) -> None:
    texts = ["The sky", "A lake"]
    ids = [checked(calls.post("/tokenize", json={"prompt": text}))["tokens"] for text in texts]
    expected = embed(calls, texts)
    assert embed(calls, ids) == expected
    assert embed(calls, texts[0]) == embed(calls, ids[0]) == expected[:1]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("options", [{}, {"pooling": "last", "normalize": False, "dimensions": 7}])
def test_vectors_are_those_of_the_offline_engine(calls: Calls, options: dict[str, Any]) -> None:
    texts = ["The sky", "A lake", "x" * 50]
    config = engine_config()
    with LLM(**{**asdict(config), "model": config.model}) as llm:
        expected = [output.embedding.tolist() for output in llm.embed(texts, **options)]
    assert embed(calls, texts, **options) == expected


@pytest.mark.case("S69")
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_have_length_1_unless_declined(calls: Calls, pooling: str) -> None:
    (vector,) = embed(calls, "The sky", pooling=pooling)
    (raw,) = embed(calls, "The sky", pooling=pooling, normalize=False)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)
    assert np.allclose(np.array(raw) / np.linalg.norm(raw), vector, atol=1e-6)


@pytest.mark.case("S69")
def test_dimensions_cut_and_then_normalise(calls: Calls) -> None:
    (raw,) = embed(calls, "The sky", normalize=False)
    (short,) = embed(calls, "The sky", dimensions=5)
    assert np.allclose(short, np.array(raw[:5]) / np.linalg.norm(raw[:5]), atol=1e-6)
    assert embed(calls, "The sky", dimensions=5, normalize=False) == [raw[:5]]
    assert embed(calls, "The sky", dimensions=len(raw)) == embed(calls, "The sky")


@pytest.mark.case("S66")
def test_base64_holds_the_same_numbers_as_little_endian_float32(calls: Calls) -> None:
    (vector,) = embed(calls, "The sky")
    reply = calls.post(PATH, json={"input": "The sky", "encoding_format": "base64"})
    content = base64.b64decode(checked(reply)["data"][0]["embedding"], validate=True)
    assert list(struct.unpack(f"<{len(vector)}f", content)) == vector


@pytest.mark.case("V59", "S68")
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vector_is_the_same_alone_and_among_31_others(calls: Calls, pooling: str) -> None:
    others = [f"{'word ' * number}" + "x" for number in range(31)]
    alone = embed(calls, "The sky", pooling=pooling)
    among = embed(calls, [*others[:15], "The sky", *others[15:]], pooling=pooling)
    assert among[15] == alone[0]
    assert len({tuple(vector) for vector in among}) == 32


@pytest.mark.case("V59", "S65")
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_nothing_is_cut_off_without_saying_so(calls: Calls, pooling: str) -> None:
    ids = [[5] * 600 + [last] * 3 for last in (6, 7)]
    reply = checked(calls.post(PATH, json={"input": ids, "pooling": pooling}))
    a, b = (d["embedding"] for d in reply["data"])
    assert a != b
    assert reply["usage"] == {"prompt_tokens": 1206, "total_tokens": 1206}
    cut = {"input": ids[0], "pooling": pooling, "truncate_prompt_tokens": 10}
    assert checked(calls.post(PATH, json=cut))["usage"]["prompt_tokens"] == 10


@pytest.mark.case("S65")
def test_input_may_fill_the_context_and_no_more(calls: Calls) -> None:
    assert embed(calls, [5] * 1024)
    error = calls.refusal(PATH, {"input": ["a", [5] * 1025]})
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]
    assert "1025" in error["message"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"input": []}, None),
        ({"input": [[]]}, None),
        ({"input": ""}, None),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[300]]}, "prompt_token_ids"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**9}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": "perhaps"}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
    ids=str,
)
def test_wrong_field_is_named(calls: Calls, wrong: dict[str, Any], field: str | None) -> None:
    body = json.dumps({"input": "The sky", **wrong})
    reply = calls.post(PATH, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field, reply.text
    assert embed(calls, "The sky")


def test_model_that_is_not_served_for_it_says_so() -> None:
    with ThreadServer(pooling="none") as server, server.calls() as calls:
        assert "--pooling none" in calls.refusal(PATH, {"input": "x"})["message"]
        assert calls.complete()["choices"]


def test_server_says_what_pooling_is_the_default(calls: Calls) -> None:
    with ThreadServer(pooling="last") as server, server.calls() as other:
        assert embed(other, "The sky") == embed(calls, "The sky", pooling="last")
    assert embed(calls, "The sky") == embed(calls, "The sky", pooling="mean")


def test_long_list_does_not_fill_the_queue() -> None:
    config = engine_config(max_num_seqs=4)
    with ThreadServer(config, max_waiting_requests=40) as server, server.calls() as calls:
        vectors = embed(calls, [[number % 250] for number in range(300)])
        assert len(vectors) == 300
        assert vectors[0] == vectors[250] != vectors[1]
        until_idle(server)


def test_one_bad_input_ends_the_others_and_leaves_nothing(calls: Calls) -> None:
    with ThreadServer() as server, server.calls() as own:
        own.refusal(PATH, {"input": [*([[5] * 500] * 20), [10**6]]})
        until_idle(server)
        assert_idle(server.engine)


@pytest.mark.case("V50")
def test_client_that_leaves_ends_its_inputs() -> None:
    with ThreadServer() as server:
        gate = block(server)
        given = [[number] * 300 for number in range(60)]
        leave({"input": given}, server, path=PATH)
        until(server, lambda: server.service.admission.num_open == 0)
        gate.open.set()
        until_idle(server)
        with server.calls() as calls:
            assert calls.complete()["choices"]
