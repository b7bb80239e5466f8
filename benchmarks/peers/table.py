"""A record as Markdown: the table, and under it what the figures depend on.

Decides which engine is Octavo's entry and how a cell looks. Invariant: every failure, and
every run that was cut or disturbed, is told.
"""

from collections.abc import Iterator, Sequence

from benchmarks.peers.figures import Spread
from benchmarks.peers.record import Record
from benchmarks.peers.work import Row, Work

# The later one counts where there are both: HTTP is compared with HTTP.
OURS = ("octavo", "octavo-http")


def render(record: Record, works: Sequence[Work]) -> str:
    """Return the table and its notes."""
    shown = [name for name, peer in record.peers.items() if not peer["missing"]]
    lines = [
        _line("work", *(record.peers[name]["title"] for name in shown), "Octavo / best", "must"),
        _line(*["---"] * (len(shown) + 3)),
    ]
    lines += [_row(record, shown, work, row) for work in works for row in work.rows]
    return "\n".join([*lines, "", *_notes(record)]) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _row(record: Record, shown: Sequence[str], work: Work, row: Row) -> str:
    cells = [_cell(record, work.name, name, row) for name in shown]
    return _line(row.title, *cells, _ratio(record, shown, work.name, row), _must(row))


def _cell(record: Record, work: str, peer: str, row: Row) -> str:
    spread = record.spread(work, peer, row.figure)
    runs = record.runs_of(work, peer)
    if spread is None:
        return "failed" if any(run.error for run in runs) else "-"
    cut = " (cut)" if any(run.cut for run in runs) else ""
    disturbed = " (disturbed)" if any(run.was_disturbed for run in runs) else ""
    return spread.text(row.digits) + cut + disturbed


def _ratio(record: Record, shown: Sequence[str], work: str, row: Row) -> str:
    ours = _ours(record, work, row)
    spreads = {name: record.spread(work, name, row.figure) for name in shown if name not in OURS}
    others = {name: spread.median for name, spread in spreads.items() if spread is not None}
    if ours is None or not others:
        return "-"
    best = (max if row.more_is_better else min)(others, key=lambda name: others[name])
    ratio = ours.median / others[best]
    verdict = "" if row.meets(ratio) else ", missed"
    return f"{ratio:.2f} of {record.peers[best]['title']}{verdict}"


def _ours(record: Record, work: str, row: Row) -> Spread | None:
    found = [record.spread(work, name, row.figure) for name in OURS]
    return next((spread for spread in reversed(found) if spread is not None), None)


def _must(row: Row) -> str:
    if row.must is None:
        return "-"
    return f"{row.must:g}" if row.aim is None else f"{row.must:g}, aim {row.aim:g}"


def _notes(record: Record) -> Iterator[str]:
    begun = ", ".join(f"{key} {value}" for key, value in record.begun.items())
    yield f"Median (least-most) of interleaved runs. {begun}."
    yield ""
    for name, peer in record.peers.items():
        versions = ", ".join(f"{key} {value}" for key, value in peer["versions"].items())
        missing = f" Missing: {peer['missing']}" if peer["missing"] else ""
        yield f"- {peer['title']} (`{name}`): {versions or 'version unknown'}.{missing}"
        for command, works in _by_command(peer["commands"]).items():
            yield f"  - {', '.join(works)}: `{command}`"
    for run in record.runs:
        if run.error:
            yield f"- {run.work} by {run.peer}, run {run.repeat} failed: {run.error}"
        if run.was_disturbed:
            others = f"{run.figures['other_cpus']:.1f} CPUs"
            yield f"- {run.work} by {run.peer}, run {run.repeat}: others used {others} meanwhile."
        if run.cut:
            yield f"- {run.work} by {run.peer} was cut after {run.figures['seconds']:.0f} s."


def _by_command(commands: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for work, command in commands.items():
        grouped.setdefault(command, []).append(work)
    return grouped
