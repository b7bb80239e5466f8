"""One page of a study that needs nothing else: no network, no server, no other file.

Decides how experiments look: light or dark as the reader's system is, on a phone as on a screen.
Plotly draws; its library is put into the page. Knows no experiment.

Invariant: every text on the page is escaped, and every axis carries its title and its unit.
"""

import json
from collections.abc import Iterator
from html import escape
from importlib import resources
from typing import Any

from octavo.errors import OctavoError
from octavo.planning.study.experiment import Axis, Cell, Experiment, Figure, Series, Table, number
from octavo.planning.study.study import Study

# How a page begins that may be replaced by a newer one.
MARK = "<!doctype html><!-- octavo study -->"
_MODES = {"line": "lines+markers", "steps": "lines", "points": "markers"}


def plotly_library() -> str:
    """Return plotly.js; raises `OctavoError` if the extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise OctavoError(
            "A study draws with Plotly, which is not installed: pip install 'octavo[plots]'."
        ) from None
    library: str = get_plotlyjs()
    return library


def page(study: Study, library: str) -> str:
    """Return the page as HTML. library: plotly.js."""
    about = ", ".join(f"{key} {value}" for key, value in study.about.items())
    kind = "A quick study" if study.is_quick else "A study"
    return "\n".join(
        [
            MARK,
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>Study of {escape(study.model)}</title>",
            f"<style>{_asset('page.css')}</style>",
            f"<script>{library}</script>",
            "</head><body><main>",
            f"<h1>Serving {escape(study.model)} on this machine</h1>",
            f"<p>{kind} by Octavo, in {number(round(study.seconds))} s: {escape(about)}.</p>",
            *(f"<p>{escape(note)}</p>" for note in study.notes),
            *_contents(study),
            *(
                line
                for index, each in enumerate(study.experiments, 1)
                for line in _section(index, each)
            ),
            f"</main><script>{_asset('page.js')}</script></body></html>",
        ]
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _contents(study: Study) -> Iterator[str]:
    yield "<nav><ol>"
    for index, experiment in enumerate(study.experiments, 1):
        yield f'<li><a href="#experiment-{index}">{escape(experiment.title)}</a></li>'
    yield "</ol></nav>"


def _section(index: int, experiment: Experiment) -> Iterator[str]:
    yield f'<section id="experiment-{index}"><h2>{index}. {escape(experiment.title)}</h2>'
    yield f'<p class="finding">{escape(experiment.finding)}</p>'
    yield '<div class="figures">'
    for figure in experiment.figures:
        label = escape(f"{figure.title}: {figure.y.label} over {figure.x.label}", quote=True)
        yield f'<figure><figcaption>{escape(figure.title)}</figcaption><div class="plot" role="img"'
        yield f' aria-label="{label}"><script type="application/json">'
        yield f"{_in_script(figure_json(figure))}</script></div></figure>"
    yield "</div>"
    yield f'<p class="method">{escape(experiment.method)}</p>'
    yield from _table(experiment.table)
    yield "</section>"


def _in_script(values: Any) -> str:
    """Return JSON that no text in it can end the script of."""
    return json.dumps(values, allow_nan=False).replace("<", "\\u003c")


def _table(table: Table) -> Iterator[str]:
    firsts = table.rows[0] if table.rows else ("",) * len(table.columns)
    heads = "".join(
        f'<th scope="col"{_kind(cell)}>{escape(name)}</th>'
        for name, cell in zip(table.columns, firsts, strict=True)
    )
    yield f'<div class="table" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row in table.rows:
        yield f"<tr>{''.join(_cell(cell) for cell in row)}</tr>"
    yield "</tbody></table></div>"


def _cell(cell: Cell) -> str:
    return f"<td{_kind(cell)}>{escape(number(cell))}</td>"


def _kind(cell: Cell) -> str:
    return "" if isinstance(cell, str) else ' class="number"'


# --- figures ------------------------------------------------------------------------------------


def figure_json(figure: Figure) -> dict[str, Any]:
    """Return a figure as Plotly's own values, without colours: those are the reader's."""
    is_grouped = len(figure.series) > 1
    names = [series.x for series in figure.series if series.kind == "bars"]
    return {
        "data": [_trace(series) for series in figure.series],
        "layout": {
            "xaxis": _axis(figure.x) | ({"type": "category"} if names else {}),
            "yaxis": _axis(figure.y) | ({} if figure.y.is_log else {"rangemode": "tozero"}),
            "showlegend": is_grouped,
            "barmode": "group",
        },
    }


def _axis(axis: Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.label}, "automargin": True}
    if axis.ticks:
        found["tickvals"] = list(axis.ticks)
        return found | ({"type": "log"} if axis.is_log else {})
    if axis.is_log:
        # Powers of ten, with 2 and 5 between them where there is room.
        return found | {"type": "log", "dtick": "D2", "tickformat": "~r"}
    return found


def _trace(series: Series) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": series.name,
        "x": list(series.x),
        "y": list(series.y),
        "meta": {"guide": series.is_guide},
    }
    if series.notes:
        found["text"] = list(series.notes)
        found["hovertemplate"] = "%{fullData.name}, %{text}<br>%{x:.4~g}, %{y:.4~g}<extra></extra>"
    if series.kind == "bars":
        return found | {"type": "bar"}
    found |= {"type": "scatter", "mode": "lines" if series.is_guide else _MODES[series.kind]}
    if series.kind == "steps":
        found["line"] = {"shape": "hv"}
    return found
