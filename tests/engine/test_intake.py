"""From prompts and parameters to requests: what is resolved, what is refused, and the limits."""

import pytest

from octavo.engine.intake import Intake, sampling_defaults
from octavo.errors import BadRequestError, ContextLengthError, InvalidParameterError
from octavo.request import SamplingParams
from tests.engines import tiny


class Letters:
    """A tokenizer of "a" to "z", with a BOS (26) that begins every prompt."""

    eos_ids = (27, 28)

    def encode(self, text, *, add_bos=True):
        return [26] * add_bos + [ord(letter) - ord("a") for letter in text.replace(" ", "")]


@pytest.fixture
def intake():
    return Intake(tokenizer=Letters(), vocab_size=30, max_model_len=20, max_pool_tokens=100, seed=7)


@pytest.fixture
def mute():
    """A model that came without a tokenizer."""
    return Intake(tokenizer=None, vocab_size=30, max_model_len=20, max_pool_tokens=100, seed=7)


def build(intake, prompt="abc", *, number=0, priority=0, **params):
    return intake.build(
        prompt, SamplingParams(**params), request_id="r", number=number, priority=priority
    )


def ids(*token_ids):
    return {"prompt_token_ids": list(token_ids)}


class TestPrompts:
    @pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}])
    def test_a_text_is_encoded_after_one_bos(self, intake, prompt):
        assert build(intake, prompt).prompt_token_ids == [26, 0, 1]

    @pytest.mark.parametrize("given", [[5, 6], (5, 6)])
    def test_token_ids_are_taken_as_they_are_and_copied(self, intake, given):
        request = build(intake, {"prompt_token_ids": given, "prompt": "shown"})
        assert request.prompt_token_ids == [5, 6]
        assert request.prompt_token_ids is not given

    @pytest.mark.parametrize(
        "prompt", [None, 5, b"ab", ["ab"], [1, 2], {}, {"prompt": None}, {"text": "ab"}, ("a",)]
    )
    def test_anything_else_is_refused_with_the_forms_that_are_known(self, intake, prompt):
        with pytest.raises(
            InvalidParameterError, match="a mapping with prompt or prompt_token_ids"
        ):
            build(intake, prompt)

    @pytest.mark.parametrize("given", [None, 5, "12", {1}, {"a": 1}])
    def test_ids_in_no_list_are_refused(self, intake, given):
        with pytest.raises(InvalidParameterError, match="prompt_token_ids must be a list"):
            build(intake, {"prompt_token_ids": given})

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("bad", [-1, 30, 10**9, 2**63 - 1, 1.0, True, None, "1", float("nan")])
    def test_an_id_that_the_model_has_not_is_refused_with_the_range(self, intake, bad):
        with pytest.raises(
            InvalidParameterError, match=r"prompt_token_ids .* from 0 to 29"
        ) as caught:
            build(intake, ids(3, bad, 3))
        assert caught.value.field == "prompt_token_ids"

    @pytest.mark.case("S41")
    def test_an_empty_prompt_is_refused_or_is_the_bos_where_there_is_one(self, intake, mute):
        for empty in (intake, mute):
            with pytest.raises(BadRequestError, match="prompt is empty"):
                build(empty, ids())
        assert build(intake, "").prompt_token_ids == [26]

    @pytest.mark.case("S41")
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_an_empty_text_is_answered_only_where_the_model_has_a_bos(self, name):
        with tiny(name) as llm:
            (output,) = llm.generate([""], SamplingParams(max_tokens=2, ignore_eos=True))
            if llm.tokenizer.add_bos:
                assert output.prompt_token_ids == [llm.tokenizer.bos_id]
                assert output.outputs[0].finish_reason == "length"
            else:
                assert isinstance(output.error, BadRequestError)
            assert llm.generate("still there", SamplingParams())[0].finished

    def test_without_a_tokenizer_only_token_ids_will_do(self, mute):
        assert build(mute, ids(1)).prompt_token_ids == [1]
        for prompt, params in (("ab", {}), (ids(1), {"stop": "a"}), (ids(1), {"bad_words": ["a"]})):
            with pytest.raises(BadRequestError, match="without a tokenizer"):
                build(mute, prompt, **params)

    def test_a_salt_becomes_an_extra_key(self, intake):
        assert build(intake).extra_keys == ()
        assert build(intake, {"prompt": "a", "cache_salt": "mine"}).extra_keys == ("mine",)
        assert build(intake, {**ids(1), "cache_salt": ""}).extra_keys == ("",)

    @pytest.mark.parametrize("salt", [5, b"a", ["a"], "\ud800", "a\udfff"])
    def test_a_salt_that_is_no_unicode_text_is_refused(self, intake, salt):
        with pytest.raises(InvalidParameterError, match="cache_salt must be a text"):
            build(intake, {"prompt": "a", "cache_salt": salt})

    @pytest.mark.parametrize("priority", [None, "1", 1.5, True, float("nan"), 2**31, -(2**63)])
    def test_a_priority_that_is_no_integer_is_refused(self, intake, priority):
        with pytest.raises(InvalidParameterError, match="priority must be an integer"):
            build(intake, priority=priority)


class TestLengths:
    @pytest.mark.case("S37")
    def test_without_max_tokens_the_rest_of_the_context_is_filled(self, intake):
        for length in (1, 12, 19):
            request = build(intake, ids(*range(length)), max_tokens=None)
            assert (request.max_tokens, request.max_length) == (20 - length, 20)

    def test_without_max_tokens_an_answer_ends_where_the_pool_does(self):
        """The last token is drawn but never computed: it takes no place."""
        intake = Intake(tokenizer=None, vocab_size=30, max_model_len=20, max_pool_tokens=16, seed=0)
        for length, most in ((1, 16), (12, 5), (16, 1), (19, 1)):
            assert build(intake, ids(*range(length)), max_tokens=None).max_tokens == most
        # What was asked for stays: the scheduler refuses it with the numbers.
        assert build(intake, ids(1), max_tokens=19).max_tokens == 19

    @pytest.mark.case("S37")
    @pytest.mark.parametrize("max_tokens", [16, 10**9, 2**63 - 1])
    def test_more_max_tokens_than_fit_are_refused_with_all_numbers(self, intake, max_tokens):
        with pytest.raises(ContextLengthError) as caught:
            build(intake, ids(*range(5)), max_tokens=max_tokens)
        total = 5 + max_tokens
        for number in ("5 tokens", f"{max_tokens:,}", f"{total:,}", "20", "15 or less"):
            assert number in str(caught.value)

    @pytest.mark.case("V45")
    def test_a_prompt_must_leave_room_for_one_token(self, intake):
        assert build(intake, ids(*range(19)), max_tokens=1).max_tokens == 1
        for length in (20, 21):
            for max_tokens in (1, None):
                with pytest.raises(ContextLengthError, match=f"{length} tokens .* holds 20"):
                    build(intake, ids(*range(length)), max_tokens=max_tokens)

    @pytest.mark.case("S36")
    def test_a_prompt_beyond_the_context_is_refused_never_cut(self, intake):
        with pytest.raises(ContextLengthError) as caught:
            build(intake, ids(*[1] * 21), max_tokens=1)
        error = caught.value
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "21 tokens" in str(error)
        assert "holds 20" in str(error)
        assert "truncate_prompt_tokens" in str(error)

    @pytest.mark.case("S36")
    def test_a_prompt_is_cut_on_the_left_only_where_that_is_asked_for(self, intake):
        request = build(intake, ids(*range(25)), max_tokens=2, truncate_prompt_tokens=4)
        assert request.prompt_token_ids == [21, 22, 23, 24]
        short = build(intake, ids(1, 2), max_tokens=2, truncate_prompt_tokens=4)
        assert short.prompt_token_ids == [1, 2]


class TestParameters:
    def test_end_tokens_are_the_models_and_the_callers(self, intake):
        assert build(intake).stop_ids == {27, 28}
        assert build(intake, stop_token_ids=[3]).stop_ids == {3, 27, 28}
        assert build(intake, stop_token_ids=[3], ignore_eos=True).stop_ids == {3}
        assert build(intake, stop_token_ids=[28], ignore_eos=True).stop_ids == {28}

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
    @pytest.mark.parametrize("bad", [30, 10**9, 2**63 - 1])
    def test_ids_that_the_model_has_not_are_refused_by_field_and_range(self, intake, field, bad):
        value = {3: 1.0, bad: 1.0} if field == "logit_bias" else [3, bad]
        with pytest.raises(InvalidParameterError, match=f"{field} .* from 0 to 29, not {bad}"):
            build(intake, **{field: value})

    def test_a_bad_word_is_banned_at_the_start_and_after_a_space(self):
        with tiny() as llm:
            request = build(llm.engine.intake, bad_words=["the", " the"])
            encode = llm.tokenizer.encode
            assert set(request.bad_word_ids) == {tuple(encode("the")), tuple(encode(" the"))}
            assert len(request.bad_word_ids) == 2

    def test_a_seed_is_the_callers_or_follows_from_the_engines_and_the_number(self, intake):
        assert build(intake, seed=-3).seed == -3
        seeds = [build(intake, number=number).seed for number in range(50)]
        assert seeds == [build(intake, number=number).seed for number in range(50)]
        assert len(set(seeds)) == 50
        other = Intake(tokenizer=None, vocab_size=30, max_model_len=20, max_pool_tokens=100, seed=8)
        assert build(other, ids(1), number=0).seed != seeds[0]


class TestSamplingDefaults:
    def test_known_names_are_taken_and_others_left(self):
        found = sampling_defaults(
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 20, "num_beams": 4}
        )
        assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
        assert sampling_defaults({}) == {}

    def test_a_value_that_no_request_may_have_is_left_out(self):
        values = {"temperature": "hot", "top_p": 7, "top_k": None, "min_p": -1}
        assert sampling_defaults({**values, "repetition_penalty": 1.1}) == {
            "repetition_penalty": 1.1
        }
