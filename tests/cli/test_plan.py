"""`octavo plan`: tables and JSON, from the configuration alone."""

import json
from pathlib import Path

import pytest

from octavo.cost.hardware import MACHINES
from tests.cli.conftest import TINY, Octavo
from tests.executors.native import needs_library
from tests.planning.subjects import config_file


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(config_file(tmp_path))


def test_a_configuration_is_planned_on_a_machine_of_the_table(octavo: Octavo, model: str) -> None:
    done = octavo("plan", model, "--machine", "a100")
    assert (done.code, done.err) == (0, "")
    for part in ("A100", "Weight formats", "Batch sizes", "Block sizes", "longest context: 8,192"):
        assert part in done.out
    assert done.out.count("*") == 2  # the legend and the knee


def test_weights_are_not_read(octavo: Octavo, model: str) -> None:
    (Path(model) / "model.safetensors").write_bytes(b"not weights")
    assert octavo("plan", model, "--machine", "a100").code == 0


def test_json_has_what_the_tables_have(octavo: Octavo, model: str) -> None:
    done = octavo("plan", model, "--machine", "l4", "--json", "--requests-per-second", "20")
    values = json.loads(done.out)
    assert values["machine"]["title"] == MACHINES["l4"].title
    assert values["machine"]["efficiency"]["products"] == 0.713
    assert values["capacity"]["kv_bytes_per_token"] == 32768
    assert [row["batch"] for row in values["rows"] if row["is_knee"]] == [values["knee"]]
    assert values["fleet"]["num_machines"] >= 1


def test_a_load_within_limits_names_machines(octavo: Octavo, model: str) -> None:
    limits = ("--max-ttft-ms", "500", "--max-itl-ms", "50")
    done = octavo("plan", model, "--machine", "l4", "--requests-per-second", "100", *limits)
    assert "100 requests per second need " in done.out
    assert "(l4)" in done.out


def test_this_machine_is_planned_without_a_name(octavo: Octavo, cache: Path) -> None:
    done = octavo("plan", str(TINY), "--prompt-tokens", "64", "--output-tokens", "16")
    assert (done.code, done.err) == (0, "")
    assert "this machine" in done.out
    assert "octavo doctor" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--machine", "h1000"), "Did you mean 'h100'"),
        (("--machine", "l4", "--memory-gib", "0.5"), "They fit on"),
        (("--machine", "l4", "--memory-gib", "-1"), "memory_gib must be above 0"),
        (("--machine", "l4", "--prompt-tokens", "9000"), "the model holds 8,192"),
        (("--machine", "l4", "--requests-per-second", "-3"), "must be above 0"),
        (
            ("--machine", "l4", "--requests-per-second", "3", "--max-itl-ms", "0.001"),
            "a request alone takes",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    octavo: Octavo, model: str, arguments: tuple[str, ...], message: str
) -> None:
    done = octavo("plan", model, *arguments)
    assert (done.code, done.out) == (1, "")
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-itl-ms", "50"), "--max-itl-ms needs a load"),
        (("--trace-speed", "2"), "--trace-speed needs --trace"),
        (("--trace", "x.csv", "--prompt-tokens", "9"), "--prompt-tokens is what --trace brings"),
        (("--trace", "x.csv", "--requests-per-second", "9"), "--requests-per-second is what"),
        (("--machines", "2"), "--machines needs --trace"),
        (("--trace", "x.csv", "--machines", "0"), "machines"),
        (("--trace", "x.csv", "--trace-limit", "0"), "trace_limit"),
        (("--router", "least-loaded"), "--router needs --trace"),
        (("--trace", "x.csv", "--router", "least-loaded"), "--router needs --machines"),
        (("--trace", "x.csv", "--verify"), "leave --trace out"),
        (("--verify",), "--verify runs the engine on this machine: leave --machine"),
    ],
)
def test_no_option_is_ignored(
    octavo: Octavo, model: str, arguments: tuple[str, ...], words: str
) -> None:
    done = octavo("plan", model, "--machine", "l4", *arguments)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


def test_unknown_model_is_one_line(octavo: Octavo, cache: Path) -> None:
    done = octavo("plan", "no-such-model", "--machine", "l4")
    assert done.code == 1
    assert "no-such-model" in done.err


# --- traces -------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE + "2023-11-16 18:15:47.68,500,9\n2023-11-16 18:15:48.68,9000,9\n")
    return file


def test_a_trace_is_simulated(octavo: Octavo, model: str, trace: Path) -> None:
    done = octavo("plan", model, "--machine", "l4", "--trace", str(trace))
    assert (done.code, done.err) == (0, "")
    for part in ("2 requests", "1 refused as too long", "53 tokens generated", "first token"):
        assert part in done.out


def test_a_simulation_is_one_json_object(octavo: Octavo, model: str, trace: Path) -> None:
    limits = ("--max-ttft-ms", "0.001")
    more = ("--trace-limit", "1", "--trace-length-scale", "0.5", "--json")
    done = octavo("plan", model, "--machine", "l4", "--trace", str(trace), *limits, *more)
    values = json.loads(done.out)
    assert (values["num_requests"], values["num_output_tokens"]) == (1, 22)
    assert (values["goodput"], values["cache_hit_share"]) == (0, 0)
    assert values["ttft"]["p99"] > 0


def test_a_malformed_trace_names_line_and_column(octavo: Octavo, model: str, trace: Path) -> None:
    trace.write_text(AZURE + "2023-11-16 18:15:47.68,many,9\n")
    done = octavo("plan", model, "--machine", "l4", "--trace", str(trace))
    assert done.code == 1
    assert "line 3: ContextTokens: 'many'" in done.err


def test_a_missing_trace_is_one_line(octavo: Octavo, model: str, tmp_path: Path) -> None:
    done = octavo("plan", model, "--machine", "l4", "--trace", str(tmp_path / "none.csv"))
    assert (done.code, done.err.count("\n")) == (1, 1)


def test_a_trace_is_served_by_machines_behind_a_router(
    octavo: Octavo, model: str, trace: Path
) -> None:
    several = ("--machines", "2", "--router", "least-loaded")
    done = octavo("plan", model, "--machine", "l4", "--trace", str(trace), *several)
    assert (done.code, done.err) == (0, "")
    assert "on 2 machines: " in done.out
    assert "Each machine that was sent a request" in done.out
    values = json.loads(
        octavo("plan", model, "--machine", "l4", "--trace", str(trace), *several, "--json").out
    )
    assert sum(each["num_requests"] for each in values["machines"]) == values["num_requests"]


def test_an_unknown_router_is_one_line(octavo: Octavo, model: str, trace: Path) -> None:
    several = ("--machines", "2", "--router", "roundrobin")
    done = octavo("plan", model, "--machine", "l4", "--trace", str(trace), *several)
    assert (done.code, done.out) == (1, "")
    assert "Did you mean 'round-robin'" in done.err


# --- running it -----------------------------------------------------------------------------------


@needs_library
def test_predictions_are_verified_on_the_spot(octavo: Octavo, cache: Path) -> None:
    short = ("--prompt-tokens", "20", "--output-tokens", "8", "--kv-cache-memory-bytes", "4000000")
    done = octavo("plan", str(TINY), *short, "--verify")
    assert done.code == 0
    assert "Verified on the spot" in done.out
    assert "decode, batch 4" in done.out
    assert "running decoding at batch 4" in done.err
    values = json.loads(octavo("plan", str(TINY), *short, "--verify", "--json").out)
    assert {row["batch"] for row in values["verified"]} >= {0, 1, 4}


def test_a_configuration_without_weights_is_not_verified(
    octavo: Octavo, model: str, cache: Path
) -> None:
    done = octavo("plan", model, "--verify", "--prompt-tokens", "8", "--output-tokens", "2")
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
