"""`octavo bench`: how well a model foretells a text, and how fast it answers.

Decides how figures look, as tables or as JSON; `octavo.planning` measures them. Invariant: stdout
carries the figures and what they depend on, progress goes to stderr.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.settings import ENGINE_OPTIONS, LOAD_OPTIONS, Command, with_options
from octavo.config import EngineConfig
from octavo.errors import BadRequestError, InvalidParameterError, OctavoError

if TYPE_CHECKING:
    from octavo.planning.perplexity import Comparison, Score, Window
    from octavo.planning.throughput import Load, Run, Spread

app = typer.Typer(rich_markup_mode=None, help="Measure a model and this machine.")

Model = Annotated[str, typer.Argument(help="Short name, path, hf:org/name[:file] or pypi:…")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_DEFAULT_MODEL = EngineConfig().model
_ENGINE = ("engine", ENGINE_OPTIONS)


@app.command(cls=Command)
@with_options(_ENGINE)
def perplexity(
    engine: dict[str, Any],
    model: Model = _DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A text in UTF-8; by default Python's help topics.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Most tokens to read, from the text's beginning.", min=2)
    ] = 65536,
    context: Annotated[int, typer.Option(help="Tokens of a window, BOS included.", min=2)] = 1024,
    compare: Annotated[
        str | None, typer.Option(help="Another executor to measure too: cpu or reference.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a model foretells a text: lower is better.

    The text is cut into windows, each read on its own. Every token counts that has one before it in
    its window: all of them if the model's prompts begin with BOS, else all but the first.
    """
    run_perplexity(
        EngineConfig.from_dict({"model": model, **engine}),
        text,
        num_tokens=tokens,
        context=context,
        compare=compare,
        as_json=as_json,
    )


@app.command(cls=Command)
@with_options(_ENGINE)
def throughput(
    engine: dict[str, Any],
    model: Model = _DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    streams: Annotated[
        str, typer.Option(help="Requests in flight, one row of the table for each number.")
    ] = "1,8,32,64",
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, before their own.", min=0)
    ] = 0,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests per row. [default: three per stream, at least 8]", min=1),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each row.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second and latency in this process, without a server.

    Each stream starts its next request when one ends. Prompts are distinct random tokens, answers
    greedy and of full length. Figures are medians over the repeats, with the least and the most.
    """
    from octavo.planning.throughput import Load

    loads = [
        Load(
            streams=number,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix=shared_prefix,
            num_requests=requests,
        )
        for number in _numbers("streams", streams)
    ]
    config = EngineConfig.from_dict({"model": model, **engine})
    run_throughput(config, loads, repeats=repeats, as_json=as_json)


@app.command(cls=Command)
@with_options(("load", LOAD_OPTIONS))
def serve(
    load: dict[str, Any],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures to this file; - is stdout, no table."),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Put every request into the JSON.")
    ] = False,
) -> None:
    """Load an OpenAI-compatible server, and measure what its clients see.

    Prompts are random token ids, answers greedy and of full length. A closed loop keeps a number of
    streams busy; an open loop sends when a rate or a trace says so, whether or not the server keeps
    up. OPENAI_API_KEY is sent if it is set. The exit code is 1 if a request failed.
    """
    from octavo.cli.bench_serve import run_bench_serve
    from octavo.planning.load.config import LoadConfig

    raise typer.Exit(run_bench_serve(LoadConfig(**load), json_file, details=details))


def _numbers(name: str, text: str) -> list[int]:
    """Return the numbers of "1,8" or "1 8"."""
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found:
        raise InvalidParameterError(name, text, "numbers with commas between, as in 1,8,32")
    return found


# --- perplexity ---------------------------------------------------------------------------------


def run_perplexity(
    config: EngineConfig,
    path: Path | None,
    *,
    num_tokens: int,
    context: int,
    compare: str | None,
    as_json: bool,
) -> None:
    """Score a text on one executor, or on two to compare, and print the figures."""
    from octavo.planning.perplexity import Comparison, configs_to_compare, count_tokens

    name, text = read_text(path)
    configs = [config] if compare is None else configs_to_compare(config, compare)
    scores: list[Score] = []
    for each in configs:
        score, windows = _score(each, text, num_tokens, context)
        scores.append(score)
    comparison = Comparison(*scores) if compare is not None else None
    if as_json:
        described: dict[str, Any] = {
            "model": config.model,
            "text": name,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "context": context,
            "windows": len(windows),
            "scores": [_score_json(score) for score in scores],
            "machine": _surroundings(),
        }
        if comparison is not None:
            described["comparison"] = _comparison_json(comparison)
        print(json.dumps(described))
        return
    print(
        f"{config.model} on {name}: {count_tokens(windows):,} tokens count, in "
        f"{_count(len(windows), 'window')} of {context:,}"
    )
    _print_table(_score_rows(scores))
    if comparison is not None:
        print(_comparison_line(comparison))
    print(_machine_line())


def read_text(path: Path | None) -> tuple[str, str]:
    """Return the name and the content of a text; without a path, Python's own help topics.

    The topics differ between versions of Python, so their name tells it.
    """
    if path is None:
        return _topics()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"Cannot read {path} as a text in UTF-8: {error}.") from None
    if not text:
        raise BadRequestError(f"{path} is empty. Give a text.")
    return path.name, text


def _topics() -> tuple[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise OctavoError(
            "This Python came without its help topics: give a text with --text."
        ) from None
    version = ".".join(map(str, sys.version_info[:3]))
    return f"the help topics of Python {version}", "".join(topics[name] for name in sorted(topics))


def _score(
    config: EngineConfig, text: str, num_tokens: int, context: int
) -> "tuple[Score, list[Window]]":
    """Start an engine, score the text and release the engine."""
    from octavo.engine.start import start_engine
    from octavo.planning.perplexity import score_windows, windows_of

    started = start_engine(config)
    try:
        windows = windows_of(started, text, num_tokens=num_tokens, context=context)
        _print_lines(started.reasons)
        with _bar("Reading") as show:
            return score_windows(started.engine, windows, show), windows
    finally:
        started.engine.close()


def _score_rows(scores: "Iterable[Score]") -> Iterator[tuple[str, ...]]:
    yield ("executor", "perplexity", "nats per token", "seconds", "tokens/s")
    for score in scores:
        yield (
            score.executor,
            f"{score.perplexity:.4f}",
            f"{score.nats:.5f} ± {score.standard_error:.5f}",
            f"{score.seconds:.1f}",
            f"{len(score.logprobs) / score.seconds:,.0f}",
        )


def _score_json(score: "Score") -> dict[str, Any]:
    return {
        "executor": score.executor,
        "perplexity": score.perplexity,
        "nats": score.nats,
        "nats_standard_error": score.standard_error,
        "tokens": len(score.logprobs),
        "seconds": score.seconds,
    }


def _comparison_line(comparison: "Comparison") -> str:
    return (
        f"{comparison.score.executor} over {comparison.other.executor}: "
        f"{comparison.percent:+.3f} % ± {comparison.standard_error_percent:.3f} % "
        f"(perplexity ratio {comparison.ratio:.6f})"
    )


def _comparison_json(comparison: "Comparison") -> dict[str, Any]:
    return {
        "ratio": comparison.ratio,
        "percent": comparison.percent,
        "percent_standard_error": comparison.standard_error_percent,
    }


# --- throughput ---------------------------------------------------------------------------------


def run_throughput(
    config: EngineConfig, loads: "list[Load]", *, repeats: int, as_json: bool
) -> None:
    """Run loads on one engine and print a row for each."""
    from octavo.engine.start import start_engine
    from octavo.planning.throughput import run_loads

    def tell(repeat: int, load: "Load", run: "Run") -> None:
        streams = _count(load.streams, "stream")
        _print_lines([f"{repeat} of {repeats}: {streams}: {run.output_rate:,.1f} tokens/s"])

    started = start_engine(config)
    try:
        _print_lines(started.reasons)
        runs = run_loads(started.engine, loads, repeats, tell)
    finally:
        started.engine.close()
    executor = started.engine.executor.name
    if as_json:
        described = {
            "model": config.model,
            "executor": executor,
            "rows": [_row_json(*row) for row in zip(loads, runs, strict=True)],
            "machine": _surroundings(),
        }
        print(json.dumps(described))
        return
    first = loads[0]
    prefix = f"{first.shared_prefix:,} shared + " if first.shared_prefix else ""
    print(
        f"{config.model} on {executor}: prompts of {prefix}{first.prompt_tokens:,} tokens, "
        f"answers of {first.output_tokens:,}; median (least-most) of {_count(repeats, 'run')}"
    )
    _print_table(_throughput_rows(loads, runs))
    print(_machine_line())


# Each figure of a run: its name in JSON, its title, its value, decimals shown.
_Figure = tuple[str, str, Callable[["Run"], float], int]


def _figures() -> list[_Figure]:
    from octavo.planning.throughput import percentile

    return [
        ("output_tokens_per_s", "tokens/s", lambda run: run.output_rate, 1),
        ("prompt_tokens_per_s", "prompt tokens/s", lambda run: run.prompt_rate, 0),
        ("ttft_p50_ms", "TTFT ms", lambda run: 1e3 * percentile(run.ttft, 50), 0),
        ("ttft_p95_ms", "p95", lambda run: 1e3 * percentile(run.ttft, 95), 0),
        ("tpot_p50_ms", "TPOT ms", lambda run: 1e3 * percentile(run.tpot, 50), 2),
        ("tpot_p95_ms", "p95", lambda run: 1e3 * percentile(run.tpot, 95), 2),
    ]


def _spread(figure: _Figure, runs: "list[Run]") -> "Spread | None":
    """Return a figure's median and range over runs, or None where answers have one token."""
    from octavo.planning.throughput import Spread

    name, _, value, _ = figure
    if name.startswith("tpot") and not runs[0].tpot:
        return None
    return Spread.of(value(run) for run in runs)


def _throughput_rows(loads: "list[Load]", runs: "list[list[Run]]") -> Iterator[tuple[str, ...]]:
    figures = _figures()
    yield ("streams", "requests", *(title for _, title, _, _ in figures), "preemptions")
    for load, repeats in zip(loads, runs, strict=True):
        cells = [_spread_text(_spread(figure, repeats), figure[3]) for figure in figures]
        preempted = sum(run.num_preemptions for run in repeats)
        yield (f"{load.streams:,}", f"{load.count:,}", *cells, f"{preempted:,}")


def _spread_text(spread: "Spread | None", digits: int) -> str:
    """Return a median and its range; one run has no range."""
    if spread is None:
        return "-"
    median, low, high = (f"{v:,.{digits}f}" for v in (spread.median, spread.low, spread.high))
    return median if spread.low == spread.high else f"{median} ({low}-{high})"


def _row_json(load: "Load", runs: "list[Run]") -> dict[str, Any]:
    row: dict[str, Any] = {
        "streams": load.streams,
        "requests": load.count,
        "shared_prefix": load.shared_prefix,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "repeats": len(runs),
        "preemptions": sum(run.num_preemptions for run in runs),
    }
    for figure in _figures():
        spread = _spread(figure, runs)
        row[figure[0]] = spread and {
            "median": spread.median,
            "min": spread.low,
            "max": spread.high,
        }
    return row


# --- how it looks -------------------------------------------------------------------------------


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"[{line}]", file=sys.stderr)


def _surroundings() -> dict[str, Any]:
    """Return what figures depend on: version, machine and commit."""
    from octavo import __version__
    from octavo.planning.machine import describe_machine

    return {"octavo": __version__, **describe_machine()}


def _machine_line() -> str:
    found = _surroundings()
    commit = f" at commit {found['commit']}" if "commit" in found else ""
    return f"octavo {found['octavo']}{commit}, {_count(found['cpus'], 'CPU')} of {found['cpu']}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows (done, total); a bar that is gone afterwards if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1)
        yield lambda done, total: progress.update(task, completed=done, total=total)
