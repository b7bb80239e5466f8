"""What a request may ask: every field's good and bad values, and when tokens end a sequence."""

import dataclasses
import math

import pytest

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.request import (
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
)

INF, NAN = math.inf, math.nan
NUMBERS = {
    # field: (lowest, highest) good value
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
    "temperature": (0, 1e6),
    "top_p": (1e-9, 1),
    "min_p": (0, 1.0),
}
INTEGERS = {
    "n": (1, 1024),
    "top_k": (-1, 2**63 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**63 - 1),
    "min_tokens": (0, 2**63 - 1),
    "logprobs": (-1, 20),
    "prompt_logprobs": (-1, 20),
    "truncate_prompt_tokens": (1, 2**63 - 1),
}
OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
OBJECTS = ("structured_outputs", "reasoning")  # tested in engine/test_grammar.py
LISTS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")


def make(**fields) -> SamplingParams:
    """With no max_tokens, so that it never limits another field."""
    return SamplingParams(**{"max_tokens": None, **fields})


def refusal(**fields) -> str:
    """The message of the error that `make` raises, which names the field."""
    with pytest.raises(InvalidParameterError) as caught:
        make(**fields)
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_value")
    (name,) = [name for name in fields if error.field.startswith(name)]
    assert str(error).startswith(name)
    assert len(str(error)) < 300
    return str(error)


def test_defaults_are_those_that_vllm_documents():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "truncate_prompt_tokens": None,
        "structured_outputs": None,
        "reasoning": None,  # Octavo's own
    }


def test_every_field_is_covered_here():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert fields == {*NUMBERS, *INTEGERS, *SWITCHES, *LISTS, *OBJECTS}


class TestNumbers:
    @pytest.mark.parametrize("field", NUMBERS)
    def test_both_ends_of_the_range_are_good(self, field):
        for value in NUMBERS[field]:
            assert getattr(make(**{field: value}), field) == value

    @pytest.mark.parametrize("field", NUMBERS)
    @pytest.mark.parametrize(
        "value", [NAN, INF, -INF, -3, 1e300, 2**63, 10**400, True, "0.5", None, [0.5], 1j]
    )
    def test_out_of_range_or_no_number_is_refused(self, field, value):
        refusal(**{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("presence_penalty", 2.01),
            ("frequency_penalty", -2.01),
            ("repetition_penalty", 0),
            ("repetition_penalty", 1e-7),
            ("temperature", -1e-9),
            ("top_p", 0),
            ("top_p", 1.0000001),
            ("min_p", -1e-9),
            ("min_p", 1.0000001),
        ],
    )
    def test_just_outside_the_range_is_refused(self, field, value):
        refusal(**{field: value})

    def test_the_message_tells_field_range_and_value(self):
        assert refusal(top_p=1.5) == "top_p must be a number above 0 and at most 1, not 1.5."
        assert "from 0.000001 to 1000000" in refusal(repetition_penalty=1e-7)


class TestIntegers:
    @pytest.mark.parametrize("field", INTEGERS)
    def test_both_ends_of_the_range_are_good(self, field):
        for value in INTEGERS[field]:
            assert getattr(make(**{field: value}), field) == value

    @pytest.mark.parametrize("field", INTEGERS)
    def test_just_outside_the_range_is_refused(self, field):
        low, high = INTEGERS[field]
        refusal(**{field: low - 1})
        refusal(**{field: high + 1})

    @pytest.mark.parametrize("field", INTEGERS)
    @pytest.mark.parametrize("value", [True, 1.0, NAN, INF, "1", [1], 2**63, -(2**63) - 1, 10**400])
    def test_no_integer_of_the_range_is_refused(self, field, value):
        refusal(**{field: value})

    @pytest.mark.parametrize("field", INTEGERS)
    def test_none_is_good_only_where_it_has_a_meaning(self, field):
        if field in OPTIONAL:
            assert getattr(make(**{field: None}), field) is None
        else:
            refusal(**{field: None})

    def test_min_tokens_may_equal_but_not_exceed_max_tokens(self):
        assert make(min_tokens=5, max_tokens=5).min_tokens == 5
        message = refusal(min_tokens=6, max_tokens=5)
        assert message == "min_tokens must be at most max_tokens, which is 5, not 6."

    @pytest.mark.case("S52")
    def test_twenty_logprobs_are_allowed_and_twenty_one_are_not(self):
        assert make(logprobs=20).logprobs == 20
        assert "from 0 to 20" in refusal(logprobs=21)


class TestSwitches:
    @pytest.mark.parametrize("field", SWITCHES)
    @pytest.mark.parametrize("value", [0, 1, None, "true", NAN])
    def test_only_true_and_false_are_good(self, field, value):
        refusal(**{field: value})
        assert make(**{field: False}) != make(**{field: True})


class TestStop:
    @pytest.mark.parametrize(
        ("stop", "strings"),
        [(None, ()), ([], ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
    )
    def test_stop_strings_are_a_tuple_whatever_form_was_given(self, stop, strings):
        assert make(stop=stop).stop_strings == strings

    @pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [1], 1, b"a", {"a"}, {"a": 1}])
    def test_empty_or_no_texts_are_refused(self, stop):
        refusal(stop=stop)

    def test_sixty_four_are_good_and_sixty_five_are_refused(self):
        assert len(make(stop=["x"] * 64).stop_strings) == 64
        assert "at most 64 texts, not 65" in refusal(stop=["x"] * 65)

    def test_stop_needs_detokenizing(self):
        refusal(stop="x", detokenize=False)
        assert make(stop=[], detokenize=False).stop_strings == ()


class TestTokenLists:
    @pytest.mark.case("V48")
    @pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
    @pytest.mark.parametrize("ids", [[-1], [1.0], [True], ["1"], [None], 5, "12", {1}, [1, NAN]])
    def test_anything_but_a_list_of_ids_is_refused(self, field, ids):
        refusal(**{field: ids})

    @pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
    def test_lists_and_tuples_of_ids_are_good(self, field):
        for ids in ([0, 7, 7], (1,)):
            assert getattr(make(**{field: ids}), field) == ids

    @pytest.mark.case("V48")
    def test_an_empty_allowed_list_is_refused_but_no_stop_ids_are_good(self):
        assert "at least one" in refusal(allowed_token_ids=[])
        assert make(stop_token_ids=[]).stop_token_ids == []

    @pytest.mark.parametrize("words", ["word", "", [""], ["a", ""], [1], 3, {"a"}])
    def test_bad_words_are_a_list_of_texts(self, words):
        refusal(bad_words=words)
        assert make(bad_words=["a", "b c"]).needs_history

    def test_a_long_value_is_cut_in_the_message(self):
        assert "…" in refusal(stop_token_ids=[-1] * 10_000)


class TestLogitBias:
    @pytest.mark.case("V48")
    @pytest.mark.parametrize("value", [NAN, INF, -INF, 100.1, -101, True, "1", None, 10**400])
    def test_a_value_that_is_no_number_from_minus_100_to_100_is_refused(self, value):
        assert "logit_bias[7]" in refusal(logit_bias={3: 1.0, 7: value})

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("bias", [{-1: 1.0}, {"7": 1.0}, {True: 1.0}, {1.5: 1.0}, [1], 3, "a"])
    def test_a_key_that_is_no_token_id_is_refused(self, bias):
        refusal(logit_bias=bias)

    def test_limits_and_none_at_all_are_good(self):
        assert make(logit_bias={0: -100, 1: 100.0}).logit_bias == {0: -100, 1: 100.0}
        assert make(logit_bias={}).logit_bias == {}


class TestFromDict:
    @pytest.mark.parametrize(
        ("unknown", "meant"),
        [("topp", "top_p"), ("max_token", "max_tokens"), ("temprature", "temperature")],
    )
    def test_an_unknown_name_is_refused_and_the_nearest_named(self, unknown, meant):
        with pytest.raises(BadRequestError, match="no sampling parameter") as caught:
            SamplingParams.from_dict({"n": 1, unknown: 1})
        assert repr(meant) in str(caught.value)
        assert repr(unknown) in str(caught.value)

    def test_known_names_are_checked_like_arguments(self):
        assert SamplingParams.from_dict({"top_k": 3}) == SamplingParams(top_k=3)
        assert SamplingParams.from_dict({}) == SamplingParams()
        with pytest.raises(InvalidParameterError, match=r"^top_k"):
            SamplingParams.from_dict({"top_k": -2})


class TestNeedsHistory:
    def test_only_penalties_and_bad_words_look_back(self):
        assert not make(top_k=3, top_p=0.1, min_tokens=9, logit_bias={1: 1.0}).needs_history
        for fields in (
            {"presence_penalty": 0.1},
            {"frequency_penalty": -0.1},
            {"repetition_penalty": 0.9},
            {"bad_words": ["x"]},
        ):
            assert make(**fields).needs_history


def sequence(*, prompt=(1, 2, 3), max_tokens=10, stop_ids=(), **params) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=make(**params),
        max_tokens=max_tokens,
        seed=0,
        stop_ids=frozenset(stop_ids),
    )
    return Sequence(request, index=0, order=(0, 0, 0))


def append_all(seq: Sequence, token_ids) -> list[FinishReason | None]:
    return [seq.append(token_id) for token_id in token_ids]


class TestSequenceAppend:
    def test_ends_by_length_with_the_last_of_max_tokens(self):
        seq = sequence(max_tokens=3)
        assert append_all(seq, [7, 8, 9]) == [None, None, FinishReason.LENGTH]
        assert seq.output_token_ids == [7, 8, 9]
        assert (seq.num_prompt_tokens, seq.num_output_tokens) == (3, 3)
        assert seq.stop_token is None

    @pytest.mark.case("V23")
    @pytest.mark.parametrize("stop", [5, 6])
    def test_any_stop_id_ends_it_and_is_kept(self, stop):
        seq = sequence(stop_ids={5, 6})
        assert append_all(seq, [7, stop]) == [None, FinishReason.STOP]
        assert seq.stop_token == stop
        assert seq.output_token_ids == [7, stop]

    @pytest.mark.case("V23")
    def test_stop_ids_do_not_count_before_min_tokens_generated(self):
        seq = sequence(prompt=[5] * 40, stop_ids={5}, min_tokens=3)
        assert append_all(seq, [5, 5]) == [None, None]
        assert seq.stop_token is None
        assert seq.append(5) is FinishReason.STOP

    def test_a_stop_id_as_the_last_allowed_token_is_a_stop(self):
        assert sequence(max_tokens=1, stop_ids={5}).append(5) is FinishReason.STOP

    @pytest.mark.case("V24")
    def test_an_end_token_that_is_no_stop_id_runs_to_max_tokens(self):
        seq = sequence(max_tokens=200, ignore_eos=True)
        reasons = append_all(seq, [2] * 200)
        assert reasons == [None] * 199 + [FinishReason.LENGTH]

    def test_min_tokens_beyond_max_tokens_still_ends_by_length(self):
        seq = sequence(max_tokens=2, stop_ids={5}, min_tokens=9)
        assert append_all(seq, [5, 5]) == [None, FinishReason.LENGTH]

    def test_the_prompt_is_copied_so_that_requests_do_not_grow(self):
        seq = sequence(prompt=[1, 2])
        seq.append(9)
        assert seq.request.prompt_token_ids == [1, 2]
        assert seq.token_ids == [1, 2, 9]
        assert seq.request.max_length == 12
