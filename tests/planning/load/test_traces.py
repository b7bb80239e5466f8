"""Both formats of traces, and what is wrong with a file is named with its line."""

from pathlib import Path

import pytest

from octavo.errors import BadRequestError
from octavo.planning.load.traces import TraceLine, read_trace

SHARED = Path(__file__).parents[4] / "shared" / "traces"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 4500, "input_length": 512, "output_length": 3, "hash_ids": [0]}
"""


def read(folder: Path, text: str) -> list[TraceLine]:
    file = folder / "trace"
    file.write_text(text, encoding="utf-8")
    return read_trace(file)


def test_azure_lines_have_seconds_after_the_first(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, AZURE)
    assert first == TraceLine(0.0, 4808, 10)
    assert second.arrival == pytest.approx(0.052, abs=1e-6)
    assert (third.arrival, third.num_prompt_tokens, third.num_output_tokens) == (60.0, 110, 27)


def test_columns_may_stand_in_another_order(tmp_path: Path) -> None:
    text = "GeneratedTokens,TIMESTAMP,ContextTokens\n3,2023-11-16 18:17:03.9799600,7\n"
    assert read(tmp_path, text) == [TraceLine(0.0, 7, 3)]


def test_mooncake_lines_have_hash_ids(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == [
        TraceLine(0.0, 1025, 5, (0, 1, 2)),
        TraceLine(3.5, 512, 3, (0,)),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no trace"),
        ("a,b\n1,2\n", "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE + "yesterday,1,2\n", "line 5: TIMESTAMP"),
        (AZURE + "2023-11-16 18:18:04.9799600,many,2\n", "line 5: ContextTokens: 'many'"),
        (AZURE + "2023-11-16 18:18:04.9799600,5\n", "line 5: GeneratedTokens"),
        (AZURE + "2023-11-16 18:18:04.9799600,0,2\n", "both must be at least 1"),
        (AZURE + "2023-11-16 18:18:04.9799600,5,-2\n", "both must be at least 1"),
        (AZURE + "2023-11-16 18:17:04.9799600,5,2\n", "line 5: "),
        (MOONCAKE + "{broken\n", "line 4: column 2"),
        (MOONCAKE + "[1, 2]\n", "line 4"),
        (MOONCAKE + '{"timestamp": 5000}\n', "line 4: input_length is missing"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1}\n', "no time after"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "no time after"),
        (
            MOONCAKE + '{"timestamp": 1e9, "input_length": 1e999, "output_length": 1}\n',
            "line 4: input_length: inf",
        ),
        (
            MOONCAKE
            + '{"timestamp": 1e9, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            "line 4: hash_ids: 1 of them for 513 tokens",
        ),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadRequestError, match="trace") as error:
        read(tmp_path, text)
    assert words in str(error.value)


def test_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="Cannot read"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(BadRequestError, match="Cannot read"):
        read_trace(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("azure_conv.csv", 19_366),
        ("azure_code.csv", 8_819),
        ("mooncake_conversation.jsonl", 12_031),
    ],
)
def test_published_traces_are_read_whole(name: str, count: int) -> None:
    if not (SHARED / name).exists():
        pytest.skip("the traces are not beside the checkout")
    lines = read_trace(SHARED / name)
    assert len(lines) == count
    assert 3400 < lines[-1].arrival < 3600
