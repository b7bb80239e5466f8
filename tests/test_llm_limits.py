"""Offline generation on tiny models: the cache, crowds, limits, and values beyond them."""

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import (
    ContextLengthError,
    InvalidParameterError,
    PoolTooSmallError,
    SettingError,
)
from tests.engines import (
    TINY,
    assert_idle,
    drawn,
    greedy,
    only,
    tiny,
    tokens,
)

NEWLINE, EOS, IM_END = 198, 297, 299
B = 16


def favour(*token_ids):
    """A bias that makes these tokens nearly certain, and equally likely."""
    return dict.fromkeys(token_ids, 100.0)


class TestPrefixCache:
    @pytest.mark.case("V01")
    @pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1])
    def test_a_repeated_prompt_is_cached_up_to_its_last_token(self, llm, length):
        first, second = (llm.generate(tokens(length), greedy(1))[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, length - 1)
        stats = llm.stats()
        assert (stats.num_prompt_tokens, stats.num_reused_tokens) == (2 * length, length - 1)

    @pytest.mark.case("V06")
    def test_blocks_are_shared_within_a_salt_and_never_between_two(self, llm):
        def cached(**key):
            return llm.generate({**tokens(40), **key}, greedy(1))[0].num_cached_tokens

        assert [cached(), cached()] == [0, 39]
        assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, 39]
        assert [cached(cache_salt="b"), cached(cache_salt=""), cached()] == [0, 0, 39]

    @pytest.mark.parametrize("salt", ["\ud800", 5, ["a"]])
    def test_a_salt_that_is_no_text_is_refused_and_disturbs_nobody(self, llm, salt):
        bad = {"prompt": "a", "cache_salt": salt}
        outputs = llm.generate(["good", bad, "good"], greedy(2))
        assert "cache_salt must be" in str(outputs[1].error)
        assert outputs[0].outputs == outputs[2].outputs

    @pytest.mark.case("V02")
    @pytest.mark.case("S26")
    def test_cold_and_warm_answers_are_equal_bit_for_bit(self):
        """48 prompts of 3 B + 7 tokens, each sent twice; half end in nearly tied answers."""
        params = greedy(12, logprobs=5)
        prompts = [tokens(3 * B + 7, seed) for seed in range(48)]
        for first_token, prompt in enumerate(prompts):
            prompt["prompt_token_ids"][0] = first_token
        tied = greedy(12, logprobs=5, logit_bias=favour(64, 65))
        both = [params] * 24 + [tied] * 24
        with tiny(block_size=B, num_gpu_blocks_override=400) as llm:
            first, second = (llm.generate(prompts, both) for _ in range(2))
        assert {output.num_cached_tokens for output in first} == {0}
        assert {output.num_cached_tokens for output in second} == {3 * B + 6}
        assert [o.outputs for o in first] == [o.outputs for o in second]

    @pytest.mark.case("S30")
    @pytest.mark.parametrize("name", ["gemma3", "mistral"])
    def test_the_next_turn_reuses_the_last_one_also_with_sliding_windows(self, name):
        with tiny(name, block_size=B) as llm:
            first = llm.generate(tokens(150), greedy(20))[0]
            ids = first.prompt_token_ids + first.outputs[0].token_ids + [5, 6, 7]
            second = llm.generate({"prompt_token_ids": ids}, greedy(8, logprobs=2))[0]
        # The last token of the answer was drawn but never computed.
        assert second.num_cached_tokens == 150 + 20 - 1
        with tiny(name, block_size=B, enable_prefix_caching=False) as cold:
            assert only(cold, {"prompt_token_ids": ids}, greedy(8, logprobs=2)) == second.outputs[0]

    def test_without_prefix_caching_nothing_is_reused(self, cold):
        for _ in range(2):
            assert cold.generate(tokens(40), greedy(1))[0].num_cached_tokens == 0
        assert cold.stats().num_cached_blocks == 0


class TestCrowds:
    @pytest.mark.case("V17")
    @pytest.mark.case("S27")
    @pytest.mark.parametrize("num_others", [1, 7, 31])
    def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(self, llm, num_others):
        params = greedy(12, logprobs=5)
        alone = only(llm, tokens(33), params)
        for repeat in range(3):
            others = [tokens(1 + 13 * i % 100, 100 * repeat + i + 1) for i in range(num_others)]
            outputs = llm.generate([*others, tokens(33)], [drawn(9)] * num_others + [params])
            assert outputs[-1].outputs == [alone]

    @pytest.mark.case("V08")
    def test_long_answers_in_a_pool_that_is_always_full_are_not_spliced(self):
        """16 unique long answers in 24 blocks, which hold a third of them at once."""
        prompts = [tokens(24, seed) for seed in range(16)]
        with tiny(block_size=B, num_gpu_blocks_override=24) as llm:
            for _ in range(2):
                crowded = llm.generate(prompts, greedy(50))
            assert llm.stats().num_preemptions > 0
            assert_idle(llm.engine)
        with tiny(block_size=B, enable_prefix_caching=False) as llm:
            for seed in (0, 5, 10, 15):
                assert crowded[seed].outputs == [only(llm, prompts[seed], greedy(50))]


class TestLimits:
    @pytest.mark.case("V09")
    def test_requests_beyond_the_pool_are_refused_at_once_and_others_proceed(self):
        with tiny(block_size=16, num_gpu_blocks_override=49, max_model_len=1024) as llm:
            outputs = llm.generate([tokens(1002, i) for i in range(5)] + [tokens(9)], greedy(1))
            for output in outputs[:5]:
                assert isinstance(output.error, PoolTooSmallError)
                assert "need 63 blocks, the pool has 49" in str(output.error)
            assert outputs[5].outputs[0].finish_reason == "length"
            assert llm.stats().step == 1

    @pytest.mark.case("V45")
    @pytest.mark.parametrize("streams", [True, False])
    def test_a_prompt_just_within_the_context_gives_one_token(self, streams):
        with tiny(max_model_len=64) as llm:

            def ask(length, max_tokens):
                if not streams:
                    return only(llm, tokens(length), greedy(max_tokens)).token_ids
                return [
                    t for d in llm.stream(tokens(length), greedy(max_tokens)) for t in d.token_ids
                ]

            assert len(ask(63, None)) == len(ask(63, 1)) == 1
            assert len(ask(60, None)) == 4
            for length, max_tokens, numbers in (
                (64, None, ("64 tokens", "holds 64")),
                (65, 1, ("65 tokens", "holds 64")),
                (63, 2, ("63 tokens", "max_tokens is 2", "together 65", "holds 64")),
                (10, 10**9, ("10 tokens", "1,000,000,000", "holds 64")),
            ):
                with pytest.raises(ContextLengthError) as caught:
                    ask(length, max_tokens)
                assert all(number in str(caught.value) for number in numbers)
            assert_idle(llm.engine)

    @pytest.mark.case("S38")
    def test_a_reply_without_a_limit_ends_at_the_context(self, llm):
        completion = only(llm, tokens(1000), greedy(None))
        assert (len(completion.token_ids), completion.finish_reason) == (24, "length")

    @pytest.mark.case("S24")
    def test_a_prompt_far_beyond_the_context_is_refused_also_when_it_is_cached(self, llm):
        assert only(llm, tokens(1023), greedy(1)).token_ids
        assert len(only(llm, tokens(1023), greedy(1)).token_ids) == 1  # warm
        with pytest.raises(ContextLengthError, match="55,000 tokens but the model holds 1,024"):
            llm.generate(tokens(55_000), greedy(1))

    @pytest.mark.case("S40")
    def test_a_prompt_of_50_kilobytes_is_refused_or_cut_where_that_is_asked_for(self, llm):
        text = "The pages of a prompt. " * 2200
        outputs = llm.generate(
            [text, text, "short"], [greedy(2), greedy(2, truncate_prompt_tokens=100), greedy(2)]
        )
        assert isinstance(outputs[0].error, ContextLengthError)
        assert len(outputs[1].prompt_token_ids) == 100
        assert [len(o.outputs[0].token_ids) for o in outputs[1:]] == [2, 2]

    @pytest.mark.case("V15")
    @pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
    def test_every_documented_block_size_works_and_answers_the_same(self, block_size, cold):
        with tiny(block_size=block_size) as llm:
            found = only(llm, tokens(70), greedy(logprobs=2))
        assert found == only(cold, tokens(70), greedy(logprobs=2))

    @pytest.mark.case("V15")
    @pytest.mark.parametrize("block_size", [0, 1, 8, 24, 512, -16, "16", 16.0])
    def test_any_other_block_size_is_refused_before_a_model_is_opened(self, block_size):
        with pytest.raises(SettingError, match=r"block_size must be one of 16, 32, 64, 128, 256"):
            LLM("no such model", block_size=block_size)

    def test_an_unknown_setting_names_the_closest(self):
        with pytest.raises(SettingError, match="max_model_len"):
            LLM("no such model", max_modle_len=5)


IDS = [-1, 300, 10**9, 2**63 - 1]


class TestWildIds:
    @pytest.mark.case("V48")
    @pytest.mark.parametrize("bad", IDS)
    @pytest.mark.parametrize(
        "field", ["prompt_token_ids", "logit_bias", "stop_token_ids", "allowed_token_ids"]
    )
    def test_an_id_outside_the_vocabulary_is_refused_and_a_healthy_request_unaffected(
        self, llm, field, bad
    ):
        healthy = llm.stream(tokens(20), greedy(6, logprobs=3))
        deltas = [next(healthy)]

        def ask():
            if field == "prompt_token_ids":
                llm.generate({"prompt_token_ids": [5, bad, 5]}, greedy(1))
            value = {bad: 1.0} if field == "logit_bias" else [bad]
            llm.generate(tokens(5), greedy(4, min_tokens=2, **{field: value}))

        with pytest.raises(InvalidParameterError, match=field) as caught:
            ask()
        assert caught.value.status == 400
        # Only the model knows the upper end; parameters refuse a negative id before it is asked.
        assert bad == -1 or "from 0 to 299" in str(caught.value)
        deltas += healthy
        found = [logprobs for delta in deltas for logprobs in delta.logprobs]
        assert found == only(llm, tokens(20), greedy(6, logprobs=3)).logprobs

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("bias", [float("inf"), float("-inf"), float("nan")])
    def test_a_bias_without_a_finite_value_is_refused(self, bias):
        with pytest.raises(InvalidParameterError, match=r"logit_bias\[5\].* from -100 to 100"):
            SamplingParams(logit_bias={5: bias})

    @pytest.mark.case("V48")
    def test_an_empty_allowed_list_is_refused(self):
        with pytest.raises(InvalidParameterError, match=r"allowed_token_ids.*at least one"):
            SamplingParams(allowed_token_ids=[])

    def test_ids_that_the_model_has_and_its_tokenizer_has_not_add_no_text(self):
        """Qwen pads its vocabulary: 307 rows, of which 300 have a token."""
        with tiny("qwen2") as llm:
            ids = [64, 300, 306]
            completion = only(llm, tokens(9), drawn(12, seed=1, allowed_token_ids=ids, logprobs=-1))
            assert set(completion.token_ids) == set(ids)
            assert completion.text == "a" * completion.token_ids.count(64)
            assert completion.logprobs[0][306].decoded_token == ""
            assert only(llm, {"prompt_token_ids": [306]}, greedy(1)).finish_reason == "length"


def test_settings_of_the_model_become_sampling_defaults_unless_told_otherwise(tmp_path):
    for path in (TINY / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    defaults = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 9, "eos_token_id": 297}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    with LLM(str(tmp_path), num_gpu_blocks_override=8) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7)
    with LLM(str(tmp_path), num_gpu_blocks_override=8, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
