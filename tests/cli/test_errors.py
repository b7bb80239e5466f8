"""Whatever a user gets wrong is one line on stderr and an exit code; nothing reaches stdout."""

import json
import shutil
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.cli.conftest import SMALL, TINY, Finished, Octavo

GENERATE = ("generate", "Hello", "--model", str(TINY), *SMALL)


def assert_one_line(done: Finished, code: int, *parts: str) -> None:
    lines = [line for line in done.err.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("octavo")
    for part in parts:
        assert part in lines[0]
    assert done.out == ""
    assert done.code == code


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generat"], ["No such command", "generate"]),
        (["generate"], ["Missing argument"]),
        (["generate", "a", "b"], ["unexpected extra argument"]),
        (["generate", "a", "--max-token", "3"], ["No such option", "--max-tokens"]),
        (["generate", "a", "--max-tokens", "many"], ["--max-tokens"]),
        (["generate", "a", "--top-p"], ["--top-p"]),
        (["program", "--context", "0"], ["--context"]),
        (["rm"], ["Missing argument"]),
    ],
)
def test_wrong_usage_exits_with_2(octavo: Octavo, arguments: list[str], parts: list[str]) -> None:
    assert_one_line(octavo(*arguments), 2, *parts, "--help")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--max-tokens", "0"], ["max_tokens", "at least 1", "0"]),
        (["--temperature", "-1"], ["temperature", "0 to", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "above 0"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-k", "-2"], ["top_k", "-2"]),
        (["--min-p", "2"], ["min_p", "0 to 1"]),
        (["--repetition-penalty", "0"], ["repetition_penalty"]),
        (["--seed", str(2**64)], ["seed", "64 bits"]),
        (["--block-size", "33"], ["block_size", "32, 64", "33"]),
        (["--kv-cache-dtype", "int4"], ["kv_cache_dtype", "bfloat16", "int4"]),
        (["--executor", "cuda"], ["executor", "reference"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "at least 1"]),
        (["--max-num-batched-tokens", "8"], ["max_num_batched_tokens", "max_num_seqs", "64"]),
        (["--max-model-len", "1"], ["max_model_len", "at least 2"]),
    ],
)
@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)])
def test_impossible_value_is_refused_before_the_model_is_looked_for(
    octavo: Octavo, command: tuple[str, ...], options: list[str], parts: list[str]
) -> None:
    done = octavo(*command, "--model", "/no/such/model.gguf", *options)
    assert_one_line(done, 1, *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--max-model-len", "5000"], ["max_model_len", "5,000", "1,024"]),
        (["--max-tokens", "5000"], ["max_tokens", "5,000", "1,024"]),
        (["--num-gpu-blocks-override", "1", "--max-tokens", "900"], ["900", "32"]),
        (
            ["--max-model-len", "1000", "--num-gpu-blocks-override", "1", "--max-tokens", "500"],
            ["500 to generate", "17 blocks", "has 1"],
        ),
        (["--chat-template", "/no/such/file"], ["chat_template", "/no/such/file"]),
        (["--tokenizer", "/no/such/folder"], ["/no/such/folder"]),
    ],
)
def test_value_that_the_model_does_not_allow(
    octavo: Octavo, options: list[str], parts: list[str]
) -> None:
    assert_one_line(octavo(*GENERATE, *options), 1, *parts)


def test_prompt_longer_than_the_context(octavo: Octavo) -> None:
    done = octavo("generate", "word " * 2000, *GENERATE[2:])
    assert_one_line(done, 1, "tokens", "1,024", "Shorten")


def test_empty_prompt_without_bos(octavo: Octavo) -> None:
    assert_one_line(octavo("generate", "", "--raw", *GENERATE[2:]), 1, "empty")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("smollm2-136m", ["smollm2-136m", "smollm2-135m"]),
        ("nothing", ["nothing", "smollm2-135m", "gemma3-270m"]),
        ("/no/such/model.gguf", ["/no/such/model.gguf"]),
        ("hf:no-slash", ["hf:ORG/NAME"]),
        ("pypi:package/file", ["pypi:PACKAGE==VERSION/FILE"]),
    ],
)
@pytest.mark.parametrize("command", ["pull", "run", "program"])
def test_unknown_model(
    octavo: Octavo, cache: Path, command: str, model: str, parts: list[str]
) -> None:
    assert_one_line(octavo(command, model), 1, *parts)
    assert not cache.exists()


def broken(folder: Path, how: str) -> Path:
    if how == "page saved as gguf":
        (folder / "model.gguf").write_bytes(b"<!DOCTYPE html>" * 99)
        return folder / "model.gguf"
    if how == "empty folder":
        return folder
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder)
    config = json.loads((TINY / "config.json").read_text())
    match how:
        case "cut weights":
            content = (TINY / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "cut config":
            (folder / "config.json").write_text('{"architectures": [')
        case "list as config":
            (folder / "config.json").write_text("[]")
        case "unknown architecture":
            config["architectures"] = ["MambaForCausalLM"]
            (folder / "config.json").write_text(json.dumps(config))
        case "other sizes":
            config["hidden_size"] = 32
            (folder / "config.json").write_text(json.dumps(config))
        case _:
            raise AssertionError(how)
    return folder


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("page saved as gguf", ["model.gguf"]),
        ("empty folder", ["config.json", ".gguf"]),
        ("cut weights", ["model.safetensors"]),
        ("no weights", ["safetensors"]),
        ("cut config", ["config.json"]),
        ("list as config", ["config.json"]),
        ("unknown architecture", ["MambaForCausalLM", "LlamaForCausalLM"]),
        ("other sizes", ["64", "32"]),
    ],
)
def test_broken_model(octavo: Octavo, tmp_path: Path, how: str, parts: list[str]) -> None:
    done = octavo("generate", "Hello", "--model", str(broken(tmp_path, how)), *SMALL)
    assert_one_line(done, 1, *parts)


def test_folder_given_for_a_file(octavo: Octavo, tmp_path: Path) -> None:
    done = octavo(*GENERATE, "--chat-template", str(tmp_path))
    assert_one_line(done, 1, "chat_template", str(tmp_path))


def test_stdin_that_is_not_text(octavo: Octavo) -> None:
    done = octavo("generate", "-", *GENERATE[2:], stdin=b"caf\xe9")
    assert_one_line(done, 1, "not UTF-8", "0xe9")
    assert_one_line(octavo("chat", *GENERATE[2:], stdin=b"caf\xe9\n"), 1, "not UTF-8", "0xe9")


def test_prompt_that_is_not_text(octavo: Octavo) -> None:
    # What Python makes of a byte 0xE9 on the command line.
    assert_one_line(octavo("generate", "caf\udce9", *GENERATE[2:]), 1, "Unicode")


def test_interrupt_exits_with_130(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.generate.run_generate", interrupted)
    done = octavo(*GENERATE)
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err


def test_file_that_the_machine_refuses(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/models/a.gguf")

    monkeypatch.setattr("octavo.cli.generate.run_generate", refused)
    assert_one_line(octavo(*GENERATE), 1, "Permission denied", "/models/a.gguf")


def test_main_is_the_console_script() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="octavo")
    assert script.load() is main
