"""Reasoning and answer, split the same wherever the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request import Reasoning
from octavo.server.reasoning import ReasoningSplitter, find_reasoning

TEXTS = ["<think>", "</think>", "<thi", "</", "nk>", "\n\n", " ", "a", "<b>", "é😀"]


def split(reasoning, pieces):
    splitter = ReasoningSplitter(reasoning)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize("reasoning", [None, Reasoning(), Reasoning(is_open=True)])
@given(texts=st.lists(st.sampled_from(TEXTS), max_size=10), data=st.data())
def test_parts_are_the_same_at_every_split(reasoning, texts, data):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert split(reasoning, pieces) == split(reasoning, [text]) == split(reasoning, text)


@pytest.mark.parametrize(
    ("reasoning", "text", "parts"),
    [
        (None, "<think>a</think>b", ("", "<think>a</think>b")),
        (Reasoning(), "<think>\na b\n</think>\n\nanswer", ("a b", "answer")),
        (Reasoning(), "answer <think>x</think>", ("", "answer <think>x</think>")),
        (Reasoning(), "  answer", ("", "  answer")),
        (Reasoning(), "<thi", ("", "<thi")),
        (Reasoning(), "<think>cut </thi", ("cut </thi", "")),
        (Reasoning(is_open=True), "a</think>b</think>", ("a", "b</think>")),
        (Reasoning(is_open=True), "never closed", ("never closed", "")),
        (Reasoning(is_open=True), "</think>b", ("", "b")),
        (Reasoning(), "", ("", "")),
    ],
)
def test_markers_and_the_blanks_beside_them_are_dropped(reasoning, text, parts):
    assert split(reasoning, [text]) == parts


def test_reasoning_and_answer_stream_at_once():
    splitter = ReasoningSplitter(Reasoning(is_open=True))
    assert splitter.push("let me") == ("let me", "")
    assert splitter.push(" see</think>yes") == (" see", "yes")
    assert splitter.push(" or no") == ("", " or no")


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("... <think> ... </think> ...", "assistant\n", Reasoning()),
        ("... <think>\n", "assistant\n<think>\n", Reasoning(is_open=True)),
        ("... <think></think>", "assistant\n<think>\n\n</think>\n\n", None),
        ("... </think>", "user: what is <think>?\nassistant\n", Reasoning()),
        ("[THINK]", "x", Reasoning(start="[THINK]", end="[/THINK]")),
        ("plain", "assistant\n", None),
        (None, "<think>", None),
    ],
)
def test_reasoning_is_that_of_template_and_prompt(template, prompt, expected):
    assert find_reasoning(template, prompt) == expected
