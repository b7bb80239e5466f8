"""`octavo generate` and `octavo chat` on the tiny model: what goes where, what is remembered."""

import re
from pathlib import Path

import pytest

from octavo.executors.reference import ReferenceExecutor
from octavo.llm import LLM
from octavo.request import SamplingParams
from tests.cli.conftest import SMALL, TINY, Octavo

MODEL = ("--model", str(TINY), *SMALL, "--max-tokens", "8")


def answer_of(prompt: object, executor: str = "auto") -> str:
    with LLM(str(TINY), num_gpu_blocks_override=64, executor=executor) as llm:
        prompt = llm.chat_prompt(prompt) if isinstance(prompt, list) else prompt
        params = SamplingParams(temperature=0, max_tokens=8)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def figures(err: str) -> list[tuple[int, int]]:
    """Return (prompt tokens, cached tokens) of every answer."""
    found = re.findall(r"\[(\d+) prompt tokens(?: \((\d+) cached\))?", err)
    return [(int(prompt), int(cached or 0)) for prompt, cached in found]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_stdout_has_the_answer_and_nothing_else(octavo: Octavo) -> None:
    done = octavo("generate", "Hello", *MODEL)
    assert done.code == 0
    assert done.out == answer_of([user("Hello")]) + "\n"


def test_figures_go_to_stderr(octavo: Octavo) -> None:
    err = octavo("generate", "Hello", *MODEL).err
    assert re.search(r"llama on the (cpu \(\w+, \d+ threads?\)|reference) executor", err)
    assert "KV cache: 64 blocks of 32 tokens" in err
    last = err.splitlines()[-1]
    assert re.fullmatch(
        r"\[\d+ prompt tokens · 8 generated · first token after \d+ ms · [\d.]+ tokens/s"
        r" · cut at the length limit\]",
        last,
    )


def test_dash_reads_the_prompt_from_stdin_without_the_last_line_break(octavo: Octavo) -> None:
    piped = octavo("generate", "-", *MODEL, stdin="Hello\n")
    assert piped.out == octavo("generate", "Hello", *MODEL).out


def test_raw_continues_the_prompt_without_a_template(octavo: Octavo) -> None:
    done = octavo("generate", "Hello", "--raw", *MODEL)
    assert done.out == answer_of("Hello") + "\n"
    assert done.out != octavo("generate", "Hello", *MODEL).out


def test_system_message_comes_first(octavo: Octavo) -> None:
    done = octavo("generate", "Hello", "--system", "Be brief.", *MODEL)
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    assert done.out == answer_of(messages) + "\n"


def test_same_seed_gives_the_same_answer(octavo: Octavo) -> None:
    sampled = (*MODEL, "--temperature", "1")
    first, again, other = (
        octavo("generate", "Hello", *sampled, "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_model_without_template_continues_the_prompt(octavo: Octavo, bare_model: Path) -> None:
    done = octavo("generate", "Hello", *MODEL, "--model", str(bare_model))
    assert done.out == answer_of("Hello") + "\n"


def test_second_turn_finds_the_first_in_the_cache(octavo: Octavo) -> None:
    done = octavo("chat", *MODEL, stdin="Hello there, who are you?\nAnd what else?\n")
    (first, nothing_cached), (second, cached) = figures(done.err)
    assert nothing_cached == 0
    # All of the first turn but, at most, where the answer's text was encoded anew.
    assert first <= cached < second
    assert done.code == 0
    assert len(done.out.splitlines()) >= 2


def test_clear_forgets_the_turns_but_not_the_system_message(octavo: Octavo) -> None:
    turns = "Hello\nMore\n/clear\nHello\n"
    done = octavo("chat", *MODEL, "--system", "Be brief.", stdin=turns)
    sizes = [size for size, _ in figures(done.err)]
    assert len(sizes) == 3
    assert sizes[0] == sizes[2] < sizes[1]


@pytest.mark.parametrize("end", ["/exit", "/quit", ""])
def test_turns_end_at(end: str, octavo: Octavo) -> None:
    done = octavo("chat", *MODEL, stdin=f"Hello\n{end}\nMore\n")
    assert done.code == 0
    assert len(figures(done.err)) == 1


def test_run_is_chat_with_the_model_as_argument(octavo: Octavo) -> None:
    options = (*SMALL, "--max-tokens", "8")
    done = octavo("run", str(TINY), *options, stdin="Hello\n")
    assert done.out == octavo("chat", *MODEL, stdin="Hello\n").out


def test_chat_needs_a_template(octavo: Octavo, bare_model: Path) -> None:
    done = octavo("chat", *MODEL, "--model", str(bare_model), stdin="Hello\n")
    assert done.code == 1
    assert "no chat template" in done.err.splitlines()[-1]
    assert "--chat-template" in done.err


def test_another_template_can_be_given(octavo: Octavo, bare_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    given = ("--model", str(bare_model), "--chat-template", str(template))
    done = octavo("generate", "Hello", *MODEL, *given)
    assert done.out == answer_of("Hello!") + "\n"


def test_interrupt_ends_the_answer_and_not_the_conversation(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = ReferenceExecutor.submit, iter(range(1000))

    def interrupted_once(self: ReferenceExecutor, batch: object) -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return submit(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceExecutor, "submit", interrupted_once)
    done = octavo("chat", *MODEL, "--executor", "reference", stdin="Hello\n/clear\nHello\n")
    assert done.code == 0
    assert re.findall(r"(\d+) generated", done.err) == ["3", "8"]
    assert done.out.endswith("\n" + answer_of([user("Hello")], "reference") + "\n")


def test_turn_that_does_not_fit_leaves_the_conversation_standing(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.generate._is_interactive", lambda: True)
    typed = iter(["Hello", "word " * 2000, "More", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    done = octavo("chat", *MODEL)
    assert [line for line in done.err.splitlines() if line.startswith("octavo: The prompt has")]
    assert len(figures(done.err)) == 2


def test_turn_that_does_not_fit_ends_a_piped_conversation(octavo: Octavo) -> None:
    done = octavo("chat", *MODEL, stdin=f"{'word ' * 2000}\nMore\n")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("octavo: The prompt has")
    assert not figures(done.err)
