"""Offline generation on tiny models: outputs, streams, samples, log-probabilities, and faults."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.errors import (
    BadRequestError,
    InvalidParameterError,
    OctavoError,
    RequestNotFoundError,
)
from tests.engines import (
    TINY,
    FailingExecutor,
    InstantExecutor,
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


class TestGenerate:
    def test_one_prompt_gives_one_output_in_vllms_shape(self, llm):
        (output,) = llm.generate("Hello pages", greedy(6), use_tqdm=False)
        (completion,) = output.outputs
        assert output.prompt == "Hello pages"
        assert output.prompt_token_ids == llm.tokenizer.encode("Hello pages")
        assert (output.finished, output.error, output.prompt_logprobs) == (True, None, None)
        assert len(completion.token_ids) == 6
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert (completion.index, completion.finish_reason) == (0, "length")
        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
        assert completion.finished()

    @pytest.mark.case("S64")
    def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(self, llm):
        prompts = [tokens(5 + 7 * i, i) for i in range(12)]
        params = [greedy(1 + 5 * i % 9) for i in range(12)]
        outputs = llm.generate(prompts, params)
        assert [o.prompt_token_ids for o in outputs] == [p["prompt_token_ids"] for p in prompts]
        assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]

    @pytest.mark.case("S64")
    def test_a_second_call_on_the_same_engine_answers_the_same(self, llm):
        first = llm.generate([tokens(20), tokens(30, 1)], greedy())
        again = llm.generate([tokens(20), tokens(30, 1)], greedy())
        assert [o.outputs for o in first] == [o.outputs for o in again]
        assert_idle(llm.engine)

    @pytest.mark.case("S64")
    @pytest.mark.case("S41")
    @pytest.mark.parametrize(
        "bad",
        ["", {"prompt_token_ids": []}, {"prompt_token_ids": [300]}, {"prompt": 5}, [1, 2], None],
    )
    def test_a_refused_prompt_in_a_list_does_not_lose_the_others(self, llm, bad):
        expected = only(llm, "good", greedy())
        outputs = llm.generate(["good", bad, tokens(9)], greedy(n=1))
        assert outputs[0].outputs == [expected]
        assert outputs[2].outputs[0].finish_reason == "length"
        refused = outputs[1]
        assert isinstance(refused.error, BadRequestError)
        assert (refused.finished, refused.outputs[0].finish_reason) == (True, "error")
        assert_idle(llm.engine)

    def test_a_single_refused_prompt_raises(self, llm):
        with pytest.raises(BadRequestError, match="prompt is empty"):
            llm.generate("", greedy())
        with pytest.raises(InvalidParameterError, match="prompt must be a text, or a mapping"):
            llm.generate({"text": "hello"}, greedy())

    def test_no_prompts_give_no_outputs(self, llm):
        assert llm.generate([], greedy()) == []

    def test_parameters_are_one_for_all_or_one_per_prompt(self, llm):
        outputs = llm.generate(["a", "b"], [greedy(2), None])
        assert len(outputs[0].outputs[0].token_ids) == 2
        assert 1 <= len(outputs[1].outputs[0].token_ids) <= 16
        with pytest.raises(InvalidParameterError, match="one for each of 2 prompts"):
            llm.generate(["a", "b"], [greedy()])
        with pytest.raises(InvalidParameterError, match="each of the 2 prompts"):
            llm.generate(["a", "b"], greedy(), priority=[1])

    def test_priorities_set_the_order_under_the_priority_policy(self):
        with tiny(max_num_seqs=1, scheduling_policy="priority") as llm:
            outputs = llm.generate(["a", "b", "c"], greedy(2), priority=[2, 1, 0])
        times = [output.metrics.finished_time for output in outputs]
        assert times == sorted(times, reverse=True)

    def test_a_priority_that_is_no_number_is_refused(self, llm):
        outputs = llm.generate(["a", "b"], greedy(1), priority=["high", 1])
        assert "priority must be an integer" in str(outputs[0].error)
        assert outputs[1].error is None

    def test_the_progress_bar_is_silent_where_stderr_is_no_terminal(self, llm, capfd):
        llm.generate(["a", "b", ""], greedy(2), use_tqdm=True)
        assert capfd.readouterr() == ("", "")

    def test_the_progress_bar_shows_on_a_terminal_and_counts_refused_prompts(
        self, llm, monkeypatch
    ):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        monkeypatch.setenv("TERM", "xterm")
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(["a", ""], greedy(2), use_tqdm=True)
        assert "2/2" in terminal.getvalue()
        shown = len(terminal.getvalue())
        llm.generate(["a"], greedy(2), use_tqdm=False)
        assert len(terminal.getvalue()) == shown

    def test_an_engine_error_is_told_per_prompt_and_raised_for_a_single_one(self, llm):
        real = llm.engine.executor
        llm.engine.executor = FailingExecutor(real, {1, 2}, RuntimeError("lost"))
        (output,) = llm.generate(["a"], greedy())
        assert str(output.error) == "lost"
        with pytest.raises(RuntimeError, match="lost"):
            llm.generate("a", greedy())

    def test_an_interrupt_leaves_a_working_engine(self, llm):
        expected = only(llm, tokens(20), greedy())
        real = llm.engine.executor
        llm.engine.executor = FailingExecutor(real, {4}, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([tokens(20), *(tokens(9, i) for i in range(1, 90))], greedy())
        llm.engine.executor = real
        assert_idle(llm.engine)
        assert only(llm, tokens(20), greedy()) == expected

    def test_a_closed_llm_says_so(self):
        with tiny() as llm:
            pass
        llm.close()
        with pytest.raises(OctavoError, match="closed"):
            llm.generate(["a"], greedy())

    def test_chat_renders_the_template_and_answers(self, llm):
        messages = [{"role": "user", "content": "Hi"}]
        (output,) = llm.chat(messages, greedy(4))
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == llm.tokenizer.encode(text, parse_special=True)
        assert output.outputs[0].finish_reason == "length"

    def test_a_refused_conversation_does_not_lose_the_others(self, llm):
        good, bad = [{"role": "user", "content": "Hi"}], [{"content": "no role"}]
        outputs = llm.chat([good, bad, good], greedy(4))
        assert [output.error is None for output in outputs] == [True, False, True]
        assert outputs[0].outputs == outputs[2].outputs
        with pytest.raises(BadRequestError, match="role"):
            llm.chat(bad, greedy(4))

    @pytest.mark.case("V43")
    @pytest.mark.parametrize("name", ["gemma3", "llama"])
    def test_a_prompt_has_one_bos_where_the_model_wants_one_and_none_elsewhere(self, name):
        with tiny(name) as llm:
            bos, wanted = llm.tokenizer.bos_id, int(llm.tokenizer.add_bos)
            text, begun = llm.generate(["Hi", f"{llm.tokenizer.bos_token}Hi"], greedy(1))
            chat = llm.chat([{"role": "user", "content": "Hi"}], greedy(1))[0]
            exact = llm.generate({"prompt_token_ids": [bos, 5]}, greedy(1))[0]
        assert text.prompt_token_ids.count(bos) == wanted
        assert begun.prompt_token_ids.count(bos) == wanted
        assert chat.prompt_token_ids.count(bos) == wanted
        assert exact.prompt_token_ids == [bos, 5]


OPTIONS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "stop string": {"stop": ["e", "on t"]},
    "stop string over tokens": {"stop": ["ab", "bc"], "allowed_token_ids": [64, 65, 66]},
    "stop string kept": {"stop": "s", "include_stop_str_in_output": True},
    "stop string late": {"stop": "a", "min_tokens": 10, "allowed_token_ids": [64, 65, 66]},
    "stop id": {"stop_token_ids": list(range(100))},
    "stop id kept": {"stop_token_ids": list(range(100)), "include_stop_str_in_output": True},
    "end token": {"logit_bias": {EOS: 4.0}, "ignore_eos": False},
    "end token late": {"logit_bias": {EOS: 4.0}, "ignore_eos": False, "min_tokens": 12},
    "special tokens shown": {"allowed_token_ids": [64, 296, 298], "skip_special_tokens": False},
    "special tokens hidden": {"allowed_token_ids": [64, 296, 298]},
    "partial characters": {"allowed_token_ids": [158, 100, 252, 120, 64, 127]},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "no text": {"detokenize": False},
}


class TestStream:
    @pytest.mark.case("V40")
    @pytest.mark.case("V37")
    @pytest.mark.case("S53")
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_the_joined_stream_is_the_whole_reply(self, llm, options):
        for seed in range(3):
            params = drawn(24, seed=seed, **options)
            (whole,) = llm.generate(tokens(20), params, use_tqdm=False)
            deltas = list(llm.stream(tokens(20), params))
            (expected,) = whole.outputs
            assert "".join(delta.text for delta in deltas) == expected.text
            assert [t for delta in deltas for t in delta.token_ids] == expected.token_ids
            logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
            assert logprobs == (expected.logprobs or [])
            assert all(len(d.logprobs or d.token_ids) == len(d.token_ids) for d in deltas)
            assert [d.is_last for d in deltas] == [False] * (len(deltas) - 1) + [True]
            assert deltas[0].prompt_logprobs == whole.prompt_logprobs
            last = deltas[-1]
            assert last.finish_reason == expected.finish_reason
            assert last.stop_reason == expected.stop_reason

    def test_the_deltas_of_several_samples_join_to_each_of_them(self, llm):
        params = drawn(12, n=3, seed=1)
        (whole,) = llm.generate(tokens(20), params)
        texts = ["", "", ""]
        for delta in llm.stream(tokens(20), params):
            texts[delta.index] += delta.text
        assert texts == [completion.text for completion in whole.outputs]

    @pytest.mark.case("S45")
    @pytest.mark.parametrize("cut", [1, 2, 3, 4])
    def test_a_reply_cut_within_a_character_ends_in_one_replacement(self, llm, cut):
        """U+6C49 takes three tokens here; an "a" follows it."""
        spells = [*llm.tokenizer.encode("汉"), 64]
        assert len(spells) == 4
        llm.engine.executor = InstantExecutor(128, B, spells)
        pieces = [delta.text for delta in llm.stream(tokens(4), greedy(cut))]
        cut_off = "\N{REPLACEMENT CHARACTER}"
        expected = {1: [cut_off], 2: ["", cut_off], 3: ["", "", "汉"], 4: ["", "", "汉", "a"]}
        assert pieces == expected[cut]
        assert only(llm, tokens(4), greedy(cut)).text == "".join(pieces)

    @pytest.mark.case("S50")
    def test_text_held_back_for_a_stop_string_is_given_at_the_end_and_a_stop_string_never(
        self, llm
    ):
        llm.engine.executor = InstantExecutor(128, B, llm.tokenizer.encode("a##b"))
        pieces = [delta.text for delta in llm.stream(tokens(4), greedy(3, stop=["###", "##bx"]))]
        assert pieces == ["a", "", "##"]
        pieces = [delta.text for delta in llm.stream(tokens(4), greedy(6, stop=["###", "#b"]))]
        assert pieces == ["a", "", "", "#"]

    def test_streams_and_whole_replies_may_interleave(self, llm):
        expected = [only(llm, tokens(20, i), drawn(9, seed=i)).token_ids for i in range(3)]
        streams = [llm.stream(tokens(20, i), drawn(9, seed=i)) for i in range(2)]
        found = [[], []]
        for position in range(9):
            for stream, ids in zip(streams, found, strict=True):
                ids += next(stream).token_ids
            if position == 4:
                (inner,) = llm.generate([tokens(20, 2)], drawn(9, seed=2))
        assert [*found, inner.outputs[0].token_ids] == expected
        assert [list(stream) for stream in streams] == [[], []]
        assert_idle(llm.engine)

    def test_closing_a_stream_aborts_it_and_disturbs_no_other(self, llm):
        expected = only(llm, tokens(20, 1), greedy(9)).token_ids
        kept, closed = (llm.stream(tokens(20, i), greedy(9)) for i in (1, 2))
        ids = [*next(kept).token_ids]
        next(closed)
        closed.close()
        assert llm.stats().num_running == 1
        ids += [token for delta in kept for token in delta.token_ids]
        assert ids == expected
        assert_idle(llm.engine)

    def test_a_stream_that_fails_ends_with_the_error(self, llm):
        llm.engine.executor = FailingExecutor(llm.engine.executor, {3}, RuntimeError("lost"))
        *deltas, last = llm.stream(tokens(20), greedy())
        assert [delta.error for delta in deltas] == [None, None]
        assert (last.finish_reason, str(last.error), last.is_last) == ("error", "lost", True)

    def test_a_refused_prompt_raises_when_the_stream_begins(self, llm):
        with pytest.raises(BadRequestError, match="empty"):
            next(llm.stream("", greedy()))
        assert_idle(llm.engine)


class TestSamples:
    @pytest.mark.case("V20")
    def test_four_samples_differ_and_come_again(self, llm):
        runs = [
            llm.generate(tokens(20), drawn(12, n=4, seed=123, temperature=0.5))[0] for _ in range(3)
        ]
        samples = [[completion.token_ids for completion in run.outputs] for run in runs]
        assert samples[0] == samples[1] == samples[2]
        assert len(set(map(tuple, samples[0]))) == 4
        assert [completion.index for completion in runs[0].outputs] == [0, 1, 2, 3]

    def test_a_sample_does_not_depend_on_how_many_there_are(self, llm):
        many = llm.generate(tokens(20), drawn(n=5, seed=7, logprobs=2))[0].outputs
        few = llm.generate(tokens(20), drawn(n=2, seed=7, logprobs=2))[0].outputs
        one = llm.generate(tokens(20), drawn(seed=7, logprobs=2))[0].outputs
        assert many[:2] == few
        assert many[:1] == one

    def test_greedy_samples_are_all_the_same(self, llm):
        outputs = llm.generate(tokens(20), greedy(n=3))[0].outputs
        assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids

    def test_samples_may_end_at_different_times(self, llm):
        outputs = llm.generate(tokens(20), drawn(40, n=8, seed=3, stop_token_ids=[*range(60)]))[0]
        assert len({len(completion.token_ids) for completion in outputs.outputs}) > 2
        assert all(completion.finish_reason == "stop" for completion in outputs.outputs)
        assert all(c.stop_reason == c.token_ids[-1] for c in outputs.outputs)
        assert_idle(llm.engine)

    @pytest.mark.case("V20")
    def test_seeded_samples_are_the_same_in_another_process(self, llm):
        script = f"""
import json
from octavo import LLM, SamplingParams
llm = LLM({str(TINY / "llama")!r}, num_gpu_blocks_override=128, block_size={B})
params = SamplingParams(temperature=0.5, seed=123, n=4, max_tokens=12, ignore_eos=True)
outputs = llm.generate({{"prompt_token_ids": {tokens(20)["prompt_token_ids"]}}}, params)
print(json.dumps([completion.token_ids for completion in outputs[0].outputs]))
"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        outputs = llm.generate(tokens(20), drawn(12, n=4, seed=123, temperature=0.5))[0].outputs
        assert json.loads(done.stdout) == [completion.token_ids for completion in outputs]

    @pytest.mark.case("V19")
    @pytest.mark.case("S28")
    def test_a_seeded_request_does_not_notice_neighbours_without_a_seed(self, llm):
        seeded, unseeded = drawn(12, seed=42, temperature=0.8), drawn(12, temperature=0.8)
        alone = only(llm, tokens(20), seeded)
        for num_others in (1, 5, 5, 5):
            prompts = [tokens(9 + i, 10 + i) for i in range(num_others)]
            outputs = llm.generate([*prompts, tokens(20)], [unseeded] * num_others + [seeded])
            assert outputs[-1].outputs == [alone]

    def test_requests_without_a_seed_differ_but_come_again_in_a_new_engine(self):
        def run(seed):
            with tiny(seed=seed) as llm:
                outputs = llm.generate([tokens(20)] * 3, drawn(12))
                return [output.outputs[0].token_ids for output in outputs]

        first, again, other = run(0), run(0), run(1)
        assert first == again
        assert len(set(map(tuple, first + other))) == 6


class TestLogprobs:
    @pytest.mark.parametrize("k", [0, 1, 5, 20])
    def test_each_position_has_the_drawn_token_and_exactly_the_top_k(self, llm, k):
        completion = only(llm, tokens(20), drawn(12, seed=1, logprobs=k))
        everything = only(llm, tokens(20), drawn(12, seed=1, logprobs=-1))
        assert completion.token_ids == everything.token_ids
        positions = zip(completion.token_ids, completion.logprobs, everything.logprobs, strict=True)
        for token, found, whole in positions:
            best = sorted(whole, key=lambda i: (-whole[i].logprob, i))[:k]
            assert next(iter(found)) == token
            assert set(found) == {token, *best}
            assert found == {i: whole[i] for i in found}
            assert len(whole) == 300
        drawn_logprobs = [next(iter(found.values())).logprob for found in completion.logprobs]
        assert completion.cumulative_logprob == pytest.approx(sum(drawn_logprobs))

    def test_ranks_count_from_the_likeliest_and_probabilities_sum_to_one(self, llm):
        completion = only(llm, tokens(20), drawn(4, seed=1, logprobs=-1))
        for whole in completion.logprobs:
            ranked = sorted(whole.values(), key=lambda entry: entry.rank)
            assert [entry.rank for entry in ranked] == list(range(1, 301))
            logprobs = [entry.logprob for entry in ranked]
            assert logprobs == sorted(logprobs, reverse=True)
            assert sum(2.718281828459045**x for x in logprobs) == pytest.approx(1)

    @pytest.mark.case("V41")
    def test_a_token_is_shown_as_its_own_text_and_never_garbled(self, llm):
        whole = only(llm, tokens(20), greedy(1, logprobs=-1)).logprobs[0]
        for token, entry in whole.items():
            content = llm.tokenizer.token_bytes(token)
            try:
                assert entry.decoded_token == content.decode()
            except UnicodeDecodeError:
                shown = "".join(rf"\x{byte:02x}" for byte in content)
                assert entry.decoded_token == f"bytes:{shown}"
        assert {" the", "\n", "</s>"} <= {entry.decoded_token for entry in whole.values()}

    @pytest.mark.case("V03")
    @pytest.mark.case("V44")
    def test_prompt_logprobs_do_not_depend_on_order_cache_or_what_follows(self, llm):
        """Eight prompts with shared beginnings, in three orders, on one warm engine."""
        beginning = tokens(40)["prompt_token_ids"]
        prompts = [
            {
                "prompt_token_ids": beginning[: 20 + 5 * (i % 4)]
                + tokens(10 + i, i + 1)["prompt_token_ids"]
            }
            for i in range(8)
        ]
        found = []
        for order in ([*range(8)], [*reversed(range(8))], [3, 1, 4, 0, 5, 2, 6, 7]):
            outputs = llm.generate([prompts[i] for i in order], greedy(2, prompt_logprobs=1))
            assert {output.num_cached_tokens for output in outputs} == {0}
            found.append(dict(zip(order, (o.prompt_logprobs for o in outputs), strict=True)))
        assert found[0] == found[1] == found[2]
        for i, prompt in enumerate(prompts):
            entries = found[0][i]
            ids = prompt["prompt_token_ids"]
            assert entries[0] is None
            assert len(entries) == len(ids)
            assert all(token in entry for token, entry in zip(ids[1:], entries[1:], strict=True))
            assert all(len(entry) <= 2 for entry in entries[1:])
            assert entries[:20] == found[0][0][:20]

    def test_a_request_for_prompt_logprobs_reads_no_blocks_but_publishes_its_own(self, llm):
        for _ in range(2):
            (output,) = llm.generate(tokens(50), greedy(1, prompt_logprobs=0))
            assert output.num_cached_tokens == 0
        (output,) = llm.generate(tokens(50), greedy(1))
        assert output.num_cached_tokens == 49

    def test_prompt_logprobs_of_a_single_token_are_one_none(self, llm):
        (output,) = llm.generate({"prompt_token_ids": [5]}, greedy(1, prompt_logprobs=3))
        assert output.prompt_logprobs == [None]

    def test_prompt_logprobs_of_a_preempted_request_are_complete(self):
        with tiny(block_size=B, num_gpu_blocks_override=6) as llm:
            outputs = llm.generate([tokens(30, s) for s in range(2)], greedy(40, prompt_logprobs=1))
            assert llm.stats().num_preemptions > 0
        with tiny(block_size=B) as llm:
            for seed, output in enumerate(outputs):
                (alone,) = llm.generate(tokens(30, seed), greedy(40, prompt_logprobs=1))
                assert output.prompt_logprobs == alone.prompt_logprobs

    def test_prompt_logprobs_are_those_that_generating_the_prompt_would_report(self, llm):
        completion = only(llm, tokens(20), greedy(10, logprobs=0))
        prompt = tokens(20)["prompt_token_ids"] + completion.token_ids
        (output,) = llm.generate({"prompt_token_ids": prompt}, greedy(1, prompt_logprobs=0))
        assert output.prompt_logprobs[20:] == completion.logprobs


class TestEnds:
    @pytest.mark.case("V24")
    def test_ignore_eos_generates_all_tokens_past_every_end_token_of_the_model(self, llm):
        bias = favour(EOS, IM_END)
        ended = only(llm, tokens(5), drawn(200, ignore_eos=False, logit_bias=bias))
        assert (len(ended.token_ids), ended.finish_reason, ended.stop_reason) == (1, "stop", None)
        assert ended.text == ""
        endless = only(llm, tokens(5), drawn(200, logit_bias=bias))
        assert (len(endless.token_ids), endless.finish_reason) == (200, "length")
        assert set(endless.token_ids) == {EOS, IM_END}
        asked = only(llm, tokens(5), drawn(200, logit_bias=bias, stop_token_ids=[IM_END]))
        assert (asked.finish_reason, asked.stop_reason) == ("stop", IM_END)
        assert asked.token_ids[-1] == IM_END

    @pytest.mark.case("V23")
    @pytest.mark.parametrize("length", [5, 200])
    def test_nothing_ends_a_reply_before_min_tokens(self, llm, length):
        """Two end tokens, a stop id and a stop string compete for every position."""
        params = drawn(
            60,
            ignore_eos=False,
            min_tokens=20,
            stop=["\n"],
            stop_token_ids=[70],
            logit_bias=favour(EOS, IM_END, 70, NEWLINE),
        )
        for seed in range(8):
            completion = only(llm, tokens(length, seed), params)
            assert completion.finish_reason == "stop"
            assert completion.token_ids[:20] == [NEWLINE] * 20
            assert len(completion.token_ids) == 21

    def test_special_tokens_are_part_of_the_text_only_where_asked_for(self, llm):
        choice = drawn(24, seed=1, allowed_token_ids=[64, EOS])
        hidden = only(llm, tokens(20), choice)
        shown = only(llm, tokens(20), replace(choice, skip_special_tokens=False))
        assert hidden.token_ids == shown.token_ids
        assert hidden.text == "a" * hidden.token_ids.count(64)
        assert shown.text == llm.tokenizer.decode(shown.token_ids, skip_special_tokens=False)
        assert "</s>" in shown.text

    def test_the_end_token_is_shown_where_stop_strings_are_kept(self, llm):
        ends = drawn(ignore_eos=False, logit_bias=favour(IM_END), skip_special_tokens=False)
        assert only(llm, tokens(20), ends).text == ""
        kept = replace(ends, include_stop_str_in_output=True)
        assert only(llm, tokens(20), kept).text == "<|im_end|>"

    @pytest.mark.case("S32")
    def test_a_turn_after_a_stop_string_reads_only_what_was_computed(self, llm, cold):
        for seed in range(6):
            params = drawn(40, seed=seed, stop=["e", "t", "a"], allowed_token_ids=[*range(60, 90)])
            first = only(llm, tokens(10), params)
            ids = tokens(10)["prompt_token_ids"] + first.token_ids[:-1] + [5, 6, 7, 8, 9] * 5
            warm = only(llm, {"prompt_token_ids": ids}, greedy(logprobs=3))
            assert warm == only(cold, {"prompt_token_ids": ids}, greedy(logprobs=3))

    def test_a_stop_reason_is_the_callers_string_or_id(self, llm):
        text = only(llm, tokens(20), greedy(12)).text
        stop = text[3:5]
        completion = only(llm, tokens(20), greedy(12, stop=[stop]))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: text.index(stop)]


class TestExplain:
    def test_an_output_can_be_explained(self, llm):
        (output,) = llm.generate(tokens(20), greedy(6), use_tqdm=False)
        told = llm.explain(output.request_id)
        assert any(line.startswith("6 tokens: 5 steps") for line in told)
        assert told[-1].endswith("in the engine: length.")

    def test_a_stream_can_be_explained_while_it_runs(self, llm):
        stream = llm.stream(tokens(20), greedy(50))
        request_id = next(stream).request_id
        assert llm.explain(request_id)[-1].startswith("It goes on")
        stream.close()

    def test_a_request_that_is_gone_says_how_many_are_kept(self):
        with tiny(explain_max_requests=1) as llm:
            first, last = llm.generate([tokens(5), tokens(6)], greedy(2), use_tqdm=False)
            assert llm.explain(last.request_id)
            for gone in (first.request_id, "none"):
                with pytest.raises(RequestNotFoundError, match="The last 1 that ended"):
                    llm.explain(gone)
