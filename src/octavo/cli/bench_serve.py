"""`octavo bench serve`: how a server fares under load, as a table and as JSON.

Decides how the figures of `octavo.planning.load` look. Invariant: stdout carries the figures and
what they depend on, progress goes to stderr, and no error of a request is left out.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import BadRequestError, OctavoError

if TYPE_CHECKING:
    from octavo.planning.load.config import LoadConfig
    from octavo.planning.load.plan import Plan
    from octavo.planning.load.report import Report
    from octavo.planning.load.run import Run

_TITLES = {
    "ttft": "TTFT, ms",
    "tpot": "TPOT, ms per token",
    "itl": "ITL, ms between chunks",
    "e2e": "E2E, ms",
}
_STDOUT = Path("-")


def run_bench_serve(config: "LoadConfig", json_file: Path | None, *, details: bool) -> int:
    """Load a server, print the figures, and return the exit code: 1 if a request failed."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise OctavoError(
            "octavo bench serve needs aiohttp. Install it with: pip install 'octavo[bench]'"
        ) from None
    from octavo.planning.load.plan import make_plan
    from octavo.planning.load.report import Report

    plan = make_plan(config)
    config, run = asyncio.run(_load(config, plan))
    report = Report(run, config.limits)
    if json_file != _STDOUT:
        _print_report(config, plan, report)
    if json_file is not None:
        _write(json_file, _described(config, plan, report, details=details))
    return 1 if report.num_failed else 0


async def _load(config: "LoadConfig", plan: "Plan") -> "tuple[LoadConfig, Run]":
    """Warm the server up and send the work; the settings come back with the model's name."""
    from octavo.planning.load.client import Target
    from octavo.planning.load.run import LoadGenerator, connect, first_model

    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else None
    async with connect(timeout=config.timeout, headers=headers) as client:
        model = config.model or await first_model(client, config.base_url.rstrip("/"))
        target = Target(url=config.url, model=model, extra=config.extra)
        with _progress(plan.num_requests) as show:
            generator = LoadGenerator(client, target, show)
            await generator.warm_up(plan.warm, plan.prefix)
            run = await generator.run(plan.sessions, config.concurrency)
    return replace(config, model=model), run


def _described(
    config: "LoadConfig", plan: "Plan", report: "Report", *, details: bool
) -> dict[str, Any]:
    from octavo import __version__
    from octavo.planning.machine import describe_machine

    described = {
        "settings": asdict(config),
        "left_out": plan.num_left_out,
        **report.as_json(),
        "machine": {"octavo": __version__, **describe_machine()},
    }
    return {**described, "details": report.requests_json()} if details else described


def _write(file: Path, described: dict[str, Any]) -> None:
    text = json.dumps(described) + "\n"
    if file == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequestError(f"Cannot write the figures to {file}: {error}.") from None


# --- the tables ---------------------------------------------------------------------------------


def _print_report(config: "LoadConfig", plan: "Plan", report: "Report") -> None:
    from rich.console import Console

    # A pipe has no width; the tables then keep their own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    left_out = f", {plan.num_left_out:,} left out as too long" if plan.num_left_out else ""
    console.print(
        f"{config.model} at {config.base_url}: {plan.pace}; {plan.lengths}{left_out}",
        markup=False,
        soft_wrap=True,
    )
    console.print(_totals(report))
    console.print(_latencies(report))
    for error, count in report.errors.most_common():
        console.print(f"{count:,} x {error}", markup=False, style="red", soft_wrap=True)


def _totals(report: "Report") -> Any:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _total_rows(report):
        table.add_row(name, value)
    return table


def _total_rows(report: "Report") -> Iterator[tuple[str, str]]:
    run = report.run
    prompt, output = report.tokens("num_prompt_tokens"), report.tokens("num_output_tokens")
    yield "requests", f"{len(run.outcomes):,}"
    yield "failed", f"{report.num_failed:,}"
    yield "of another length than asked for", f"{report.num_short:,}"
    yield "seconds", f"{run.seconds:,.2f}"
    yield "requests/s", f"{report.rate(len(report.good)):,.2f}"
    yield "output tokens", f"{output:,}"
    yield "output tokens/s", f"{report.rate(output):,.1f}"
    yield "prompt tokens", f"{prompt:,}"
    yield "prompt tokens/s", f"{report.rate(prompt):,.1f}"
    yield "of them from the cache", f"{report.tokens('num_cached_tokens'):,}"
    yield "most requests in flight", f"{run.most_in_flight:,}"
    late = report.late()
    yield "sent late, ms, p99", f"{late.as_ms()['p99']:,.1f}" if late else "-"
    if report.num_within is not None:
        limits = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in report.limits.items())
        share = report.num_within / len(run.outcomes)
        yield f"within {limits}", f"{report.num_within:,} ({share:.1%})"
        yield "goodput, requests/s", f"{report.rate(report.num_within):,.2f}"
    yield "client's CPU seconds", f"{run.cpu_seconds:,.2f} ({report.rate(run.cpu_seconds):.0%})"


def _latencies(report: "Report") -> Any:
    from rich.table import Table

    shown = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99", "max": "max"}
    table = Table()
    table.add_column("latency")
    for title in shown:
        table.add_column(title, justify="right")
    for name, spread in report.spreads().items():
        values = {} if spread is None else spread.as_ms()
        cells = [f"{values[key]:,.2f}" if values else "-" for key in shown.values()]
        table.add_row(_TITLES[name], *cells)
    return table


@contextmanager
def _progress(num_requests: int) -> "Iterator[Callable[[Run], None]]":
    """Yield what shows a run; live on a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda run: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("Loading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]} in flight, {task.fields[failed]} failed"),
    )
    num_seen = num_failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_requests, now=0, failed=0)

        def show(run: "Run") -> None:
            nonlocal num_seen, num_failed
            num_failed += sum(not outcome.is_good for outcome in run.outcomes[num_seen:])
            num_seen = len(run.outcomes)
            progress.update(task, completed=num_seen, now=run.num_in_flight, failed=num_failed)

        yield show
