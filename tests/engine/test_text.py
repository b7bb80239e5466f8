"""Tokens to text: whole characters, stop strings, and no dependence on how the text was cut."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.text import IncrementalDetokenizer, OutputText, StopStrings, token_display
from octavo.request import Reasoning, SamplingParams

many = settings(deadline=None, max_examples=200)
MULTILINGUAL = "🌶👩‍👩‍👧 汉字 नमस्ते 😊 Café 世界 “quoted”"


@dataclass(frozen=True)
class Pieces:
    """A tokenizer whose token i is `pieces[i]`."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int, /) -> bytes:
        return self.pieces[token_id]

    @property
    def ids(self) -> list[int]:
        return list(range(len(self.pieces)))


BYTES = Pieces(tuple(bytes([i]) for i in range(256)))


def chunks(items, cuts: Iterable[int]):
    """`items` cut at the given places."""
    borders = [0, *sorted(min(cut, len(items)) for cut in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(borders)]


def detokenize(tokenizer: Pieces, pushes: Iterable[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, pushes), detokenizer.finish()]


class TestIncrementalDetokenizer:
    @pytest.mark.case("V40")
    @pytest.mark.case("S45")
    def test_characters_split_into_single_bytes_come_whole(self):
        pieces = detokenize(BYTES, [[b] for b in MULTILINGUAL.encode()])
        assert "".join(pieces) == MULTILINGUAL
        assert [p for p in pieces if p] == list(MULTILINGUAL)

    @pytest.mark.case("V40")
    @pytest.mark.parametrize("num_bytes", [1, 2, 3])
    def test_text_that_ends_inside_a_character_ends_with_one_replacement(self, num_bytes):
        content = b"ok " + "😊".encode()[:num_bytes]
        pieces = detokenize(BYTES, [[b] for b in content])
        assert pieces[-1] == "\ufffd"
        assert "".join(pieces) == "ok \ufffd"

    def test_nothing_is_flushed_after_a_whole_character(self):
        assert detokenize(BYTES, [list("é".encode())]) == ["é", ""]

    @many
    @given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
    def test_any_bytes_at_any_cut_equal_one_decode_of_all(self, content, cuts):
        pieces = detokenize(BYTES, chunks(list(content), cuts))
        assert "".join(pieces) == content.decode("utf-8", errors="replace")

    def test_every_kind_of_broken_sequence_byte_by_byte_equals_one_decode(self):
        borders = b"A\x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5"
        for content in map(bytes, itertools.product(borders, repeat=3)):
            pieces = detokenize(BYTES, [[b] for b in content])
            assert "".join(pieces) == content.decode("utf-8", errors="replace")

    @many
    @given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=8))
    def test_valid_text_is_never_replaced_at_any_cut(self, text, cuts):
        content = text.encode("utf-8", errors="ignore")
        pieces = detokenize(BYTES, chunks(list(content), cuts))
        assert "".join(pieces) == content.decode()

    @pytest.mark.case("S46")
    def test_invalid_bytes_are_replaced_at_once_and_the_text_goes_on(self):
        pieces = detokenize(BYTES, [[0xE6], [ord("a")], [0xFF], [ord("b")]])
        assert pieces == ["", "\ufffda", "\ufffd", "b", ""]
        assert "".join(pieces).encode("utf-8")

    @pytest.mark.case("S48")
    def test_spaces_between_scripts_and_at_the_beginning_are_kept(self):
        tokenizer = Pieces((b" Hello", b" ", "世".encode(), "界".encode(), b" world"))
        assert detokenize(tokenizer, [[i] for i in tokenizer.ids]) == [
            " Hello", " ", "世", "界", " world", "",
        ]  # fmt: skip

    def test_special_tokens_add_nothing_even_inside_a_character(self):
        first, rest = "汉".encode()[:1], "汉".encode()[1:]
        tokenizer = Pieces((b"<|end|>", first, rest), special_ids=frozenset({0}))
        assert "".join(detokenize(tokenizer, [[0, 1], [0], [2, 0]])) == "汉"

    def test_special_tokens_are_text_when_they_are_not_skipped(self):
        tokenizer = Pieces((b"<|end|>", b"a"), special_ids=frozenset({0}))
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert detokenizer.push([1, 0]) == "a<|end|>"

    def test_no_tokens_give_no_text(self):
        assert detokenize(BYTES, [[], []]) == ["", "", ""]

    def test_two_sequences_of_one_tokenizer_do_not_share_bytes(self):
        first, second = IncrementalDetokenizer(BYTES), IncrementalDetokenizer(BYTES)
        assert first.push([0xE6]) == ""
        assert second.push([ord("a")]) == "a"
        assert second.finish() == ""


def run_stops(stops, texts, *, include=False, count_from=0):
    """All text that comes out of `texts` and the match; texts before `count_from` do not count."""
    matcher = StopStrings(stops, include=include)
    emits = [matcher.push(text, count=i >= count_from)[0] for i, text in enumerate(texts)]
    return "".join([*emits, matcher.finish()]), matcher.matched


def first_match_by_characters(stops, text, num_uncounted=0):
    """Independent of StopStrings: read one character after the other and look back."""
    for end in range(num_uncounted + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def longest_open_tail(stops, text):
    tails = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
    return max(tails, default=0)


dense_text = st.text("ab", max_size=24)
dense_stops = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
cut_places = st.lists(st.integers(0, 24), max_size=6)


class TestStopStrings:
    @pytest.mark.case("V37")
    @pytest.mark.parametrize(("include", "shown"), [(False, "x"), (True, "xABC")])
    @pytest.mark.parametrize("texts", [["xA", "BCy"], ["xABCy"], list("xABCy"), ["xAB", "Cy"]])
    def test_stop_across_borders_ends_the_text_alike_at_every_cut(self, texts, include, shown):
        assert run_stops(["ABC"], texts, include=include) == (shown, "ABC")

    @many
    @given(dense_stops, dense_text, cut_places, st.booleans())
    def test_any_cut_gives_the_match_that_reading_by_characters_gives(
        self, stops, text, cuts, include
    ):
        match = first_match_by_characters(stops, text)
        expected = (text, None)
        if match is not None:
            end, stop = match
            expected = (text[: end if include else end - len(stop)], stop)
        assert run_stops(stops, chunks(text, cuts), include=include) == expected

    @many
    @given(dense_stops, dense_text, cut_places)
    def test_only_the_longest_tail_that_may_become_a_stop_is_held_back(self, stops, text, cuts):
        matcher, shown, pushed = StopStrings(stops), "", ""
        for piece in chunks(text, cuts):
            emit, matched = matcher.push(piece)
            shown, pushed = shown + emit, pushed + piece
            if matched is not None:
                break
            assert len(shown) == len(pushed) - longest_open_tail(stops, pushed)

    @many
    @given(dense_stops, dense_text, dense_text, cut_places, cut_places, st.booleans())
    def test_a_stop_counts_only_if_it_ends_in_text_that_counts(
        self, stops, early, late, early_cuts, late_cuts, include
    ):
        match = first_match_by_characters(stops, early + late, num_uncounted=len(early))
        expected = (early + late, None)
        if match is not None:
            end, stop = match
            expected = ((early + late)[: end if include else end - len(stop)], stop)
        before = chunks(early, early_cuts)
        texts = [*before, *chunks(late, late_cuts)]
        assert run_stops(stops, texts, include=include, count_from=len(before)) == expected

    @pytest.mark.case("V38")
    def test_long_stop_does_not_delay_text_that_cannot_begin_it(self):
        matcher = StopStrings(["#" * 200])
        assert [matcher.push(t)[0] for t in ("Hello", " world", "!")] == ["Hello", " world", "!"]
        assert matcher.push("##")[0] == ""
        assert matcher.push("x")[0] == "##x"

    @pytest.mark.case("S50")
    def test_held_tail_is_flushed_when_the_text_ends(self):
        matcher = StopStrings(["###"])
        assert matcher.push("end ##") == ("end ", None)
        assert matcher.finish() == "##"
        assert matcher.finish() == ""

    def test_an_included_stop_holds_nothing_back(self):
        matcher = StopStrings(["###"], include=True)
        assert matcher.push("end #") == ("end #", None)
        assert matcher.push("#") == ("#", None)
        assert matcher.push("#tail") == ("#", "###")
        assert matcher.finish() == ""

    @pytest.mark.case("S49")
    def test_stop_is_found_whatever_pieces_spell_it(self):
        for texts in (["O P Q"], ["O", " P", " Q"], ["O ", "P ", "Q"], list("O P Q")):
            assert run_stops(["O P Q"], ["N ", *texts, " R"]) == ("N ", "O P Q")

    def test_stop_complete_first_wins_over_one_that_begins_first(self):
        assert run_stops(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")

    @pytest.mark.parametrize("stops", [["abc", "bc"], ["bc", "abc"]])
    def test_of_stops_complete_together_the_first_in_the_list_wins(self, stops):
        assert run_stops(stops, ["xabc"])[1] == stops[0]

    def test_nothing_comes_out_after_the_match(self):
        matcher = StopStrings(["."])
        assert matcher.push("a.b") == ("a", ".")
        assert matcher.push("c") == ("", ".")
        assert matcher.finish() == ""

    def test_a_whole_stop_that_does_not_count_is_not_held_back(self):
        matcher = StopStrings(["##"])
        assert matcher.push("x##", count=False) == ("x#", None)
        assert matcher.push("y") == ("#y", None)

    def test_stop_of_wide_characters_matches(self):
        assert run_stops(["。", "👩‍👩‍👧"], list("汉👩‍👩‍👧字。")) == ("汉", "👩‍👩‍👧")


def output(tokenizer, ids, pushes=None, **params):
    """Deltas (the flush is the last), the match and the OutputText after all pushes."""
    text = OutputText(tokenizer, SamplingParams(max_tokens=None, **params))
    results = [text.push(push) for push in (pushes or [[i] for i in ids])]
    assert {matched for _, matched in results[-1:]} <= {text.matched}
    return [*(delta for delta, _ in results), text.finish()], text.matched, text


class TestOutputText:
    @many
    @given(st.binary(max_size=24), cut_places, st.lists(st.sampled_from(["a", "é", "bc"])))
    def test_joined_deltas_equal_the_text_at_every_cut(self, content, cuts, stop):
        ids = list(content)
        whole, matched, _ = output(BYTES, ids, [ids], stop=stop)
        deltas, same, text = output(BYTES, ids, chunks(ids, cuts), stop=stop)
        assert "".join(deltas) == "".join(whole) == text.text
        assert matched == same

    @pytest.mark.case("V37")
    @pytest.mark.parametrize("pushes", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]])
    def test_tokens_after_the_stop_are_not_counted(self, pushes):
        tokenizer = Pieces((b"xA", b"BCy", b"zzz"))
        deltas, matched, text = output(tokenizer, None, pushes, stop=["ABC"])
        assert ("".join(deltas), matched, text.num_tokens) == ("x", "ABC", 2)

    @pytest.mark.case("V23")
    @pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 3), (2, 3), (3, 5)])
    def test_a_stop_string_before_min_tokens_does_not_end_the_text(self, min_tokens, num_tokens):
        tokenizer = Pieces((b"a\n", b"b", b"\n", b"c", b"\n", b"d"))
        for pushes in ([tokenizer.ids], [[i] for i in tokenizer.ids]):
            deltas, matched, text = output(
                tokenizer, None, pushes, stop="\n", min_tokens=min_tokens
            )
            assert (matched, text.num_tokens) == ("\n", num_tokens)
            expected = b"".join(tokenizer.pieces[:num_tokens])[:-1].decode()
            assert "".join(deltas) == expected

    @pytest.mark.case("V23")
    def test_a_stop_that_begins_before_min_tokens_and_ends_after_counts(self):
        tokenizer = Pieces((b"x#", b"#", b"y"))
        deltas, matched, _ = output(tokenizer, tokenizer.ids, stop="##", min_tokens=1)
        assert ("".join(deltas), matched) == ("x", "##")

    @pytest.mark.case("V38")
    def test_text_without_a_stop_comes_token_by_token(self):
        tokenizer = Pieces((b"Hello", b" world", b"!"))
        deltas, _, _ = output(tokenizer, tokenizer.ids, stop=["\n\nHuman: " * 20])
        assert deltas == ["Hello", " world", "!", ""]

    @pytest.mark.case("V40")
    @pytest.mark.parametrize("stop", [None, ["zzz"]])
    @pytest.mark.parametrize("num_tokens", range(len("a😊汉".encode()) + 1))
    def test_cut_by_length_loses_nothing_and_replaces_once(self, num_tokens, stop):
        ids = list("a😊汉".encode()[:num_tokens])
        deltas, _, text = output(BYTES, ids, stop=stop)
        assert "".join(deltas) == text.text == bytes(ids).decode("utf-8", errors="replace")
        assert text.text.count("\ufffd") == (num_tokens not in (0, 1, 5, 8))

    def test_held_tail_comes_before_the_replaced_character(self):
        deltas, matched, _ = output(BYTES, [*b"a#", 0xE6], stop="##")
        assert (deltas, matched) == (["a", "", "", "#\ufffd"], None)

    def test_nothing_is_flushed_after_a_stop(self):
        deltas, matched, text = output(BYTES, None, [[*b"a.", 0xE6]], stop=".")
        assert (deltas, matched, text.text) == (["a", ""], ".", "a")

    def test_the_rest_of_the_token_that_completed_a_stop_is_dropped(self):
        tokenizer = Pieces((b"a", b".b\xe6"))
        deltas, matched, _ = output(tokenizer, tokenizer.ids, stop=".")
        assert (deltas, matched) == (["a", "", ""], ".")

    def test_skip_special_tokens_follows_the_parameters(self):
        tokenizer = Pieces((b"<s>", b"a"), special_ids=frozenset({0}))
        assert output(tokenizer, [0, 1])[0] == ["", "a", ""]
        assert output(tokenizer, [0, 1], skip_special_tokens=False)[0] == ["<s>", "a", ""]

    def test_text_can_be_read_between_pushes(self):
        text = OutputText(BYTES, SamplingParams())
        assert text.text == ""
        for i, letter in enumerate("abc"):
            text.push([ord(letter)])
            assert text.text == "abc"[: i + 1]


class TestTokenDisplay:
    @pytest.mark.case("V41")
    def test_token_of_a_part_of_a_character_is_shown_as_bytes(self):
        assert token_display("汉".encode()[:2]) == "bytes:\\xe6\\xb1"
        assert token_display(b" \xe2") == "bytes: \\xe2"

    @pytest.mark.case("V41")
    @pytest.mark.parametrize("text", ["", " the", "“", "汉字", "\n", "\ufffd"])
    def test_whole_characters_are_shown_as_they_are(self, text):
        assert token_display(text.encode()) == text

    @pytest.mark.case("V41")
    @given(st.binary(max_size=6))
    def test_shown_text_is_valid_and_never_replaced(self, content):
        shown = token_display(content)
        assert shown.encode("utf-8")[:6] == b"bytes:" or shown.encode("utf-8") == content

    @pytest.mark.case("V41")
    def test_bytes_of_the_tokens_concatenate_to_the_text(self):
        content = MULTILINGUAL.encode()
        deltas, _, _ = output(BYTES, list(content))
        assert b"".join(map(BYTES.token_bytes, content)).decode() == "".join(deltas)


@pytest.mark.case("V36")
@many
@given(
    parts=st.lists(st.sampled_from(["a", "\n\n", "b\n", "</", "think>", "<"]), max_size=8),
    answer=st.lists(st.sampled_from(["x", "\n", "\n\n", "y"]), max_size=5),
    is_open=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_stop_strings_apply_to_the_answer_only(parts, answer, is_open, cuts):
    thought = "".join(parts).partition("</think>")[0]
    start = "" if is_open else "<think>"
    before, after = f"{start}{thought}</think>", "".join(answer)
    params = SamplingParams(stop="\n\n", reasoning=Reasoning(is_open=is_open))
    output = OutputText(BYTES, params)
    for piece in chunks(list((before + after).encode()), cuts):
        output.push(piece)
    output.finish()
    assert output.text == before + after.partition("\n\n")[0]


@pytest.mark.case("V36")
@pytest.mark.parametrize(
    ("reasoning", "text", "shown"),
    [
        (Reasoning(), "no thought\n\nmore", "no thought"),
        (Reasoning(), "<thin\n\nmore", "<thin"),
        (Reasoning(), "<think>a\n\nb", "<think>a\n\nb"),
        (Reasoning(is_open=True), "a\n\nb</thi", "a\n\nb</thi"),
        (None, "<think>a\n\nb", "<think>a"),
    ],
)
def test_text_without_an_end_of_reasoning_is_all_of_one_kind(reasoning, text, shown):
    output = OutputText(BYTES, SamplingParams(stop="\n\n", reasoning=reasoning))
    output.push(list(text.encode()))
    output.finish()
    assert output.text == shown
