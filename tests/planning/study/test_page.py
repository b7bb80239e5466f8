"""The page: self-contained, escaped, and with a unit on every axis; and how Chromium draws it."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.planning.study.experiment import Axis, Experiment, Figure, Series, Table
from octavo.planning.study.page import MARK, figure_json, page, plotly_library
from octavo.planning.study.study import Study
from tests.planning.study.browser import CHROMIUM, WHY_MISSING, browser

LABEL = re.compile(r"[\w ,:'-]+ \([\w /%]+\)")
HOSTILE = "</script><script>alert(1)</script><b>&\"'"


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of scripts by type."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._is_json = self._is_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        is_script = tag in ("script", "style")
        self._is_json = is_script and dict(attrs).get("type") == "application/json"
        self._is_code = is_script and not self._is_json

    def handle_endtag(self, tag: str) -> None:
        self._is_json = self._is_code = False

    def handle_data(self, data: str) -> None:
        if self._is_json:
            self.scripts.append(data)
        elif not self._is_code:
            self.text.append(data)


def small(text: str = "plain") -> Study:
    """A study with one experiment in which every text is `text`."""
    figure = Figure(
        title=text,
        x=Axis(title=text, unit="s"),
        y=Axis(title="speed", unit="GFLOP/s", is_log=True),
        series=(Series(name=text, x=(1, 2), y=(1.0, 2.0), notes=(text, text)),),
    )
    experiment = Experiment(
        title=text,
        method=text,
        finding=text,
        figures=(figure,),
        table=Table(columns=(text, "ms"), rows=((text, 1.5),)),
    )
    return Study(
        model=text, about={"cpu": text}, notes=(text,), is_quick=True, seconds=1.0,
        experiments=(experiment,),
    )  # fmt: skip


def test_every_axis_has_a_title_with_a_unit(study: Study) -> None:
    figures = [figure for experiment in study.experiments for figure in experiment.figures]
    assert len(figures) == 14
    for figure in figures:
        layout = figure_json(figure)["layout"]
        for axis in ("xaxis", "yaxis"):
            assert LABEL.fullmatch(layout[axis]["title"]["text"]), layout[axis]


def test_plotly_knows_every_value_of_a_figure(study: Study) -> None:
    from plotly.graph_objects import Figure as Drawn

    for experiment in study.experiments:
        for figure in experiment.figures:
            Drawn(figure_json(figure))  # raises for what it does not know


def test_the_page_needs_no_other_file(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert text.startswith(MARK)
    for tag, attributes in Parsed(text).tags:
        assert not {"src", "srcset"} & set(attributes), tag
        assert tag != "link"
        assert (attributes.get("href") or "#").startswith("#")


def test_the_page_has_findings_methods_and_all_numbers(study: Study, page_file: Path) -> None:
    parsed = Parsed(page_file.read_text(encoding="utf-8"))
    words = " ".join(parsed.text)
    for experiment in study.experiments:
        assert experiment.finding in words
        assert experiment.method in words
    cells = sum(len(row) for each in study.experiments for row in each.table.rows)
    assert sum(tag == "td" for tag, _ in parsed.tags) == cells
    assert len(parsed.scripts) == 14


def test_no_text_can_break_out_of_its_place() -> None:
    parsed = Parsed(page(small(HOSTILE), "/* library */"))
    kinds = {tag for tag, _ in parsed.tags}
    assert "b" not in kinds
    assert sum(tag == "script" for tag, _ in parsed.tags) == 3
    (figure,) = (json.loads(text) for text in parsed.scripts)
    assert figure["data"][0]["name"] == HOSTILE


def test_numbers_that_json_has_not_are_refused() -> None:
    study = small()
    (experiment,) = study.experiments
    (figure,) = experiment.figures
    broken = replace(figure, series=(Series(name="s", x=(1,), y=(float("nan"),)),))
    with pytest.raises(ValueError, match="JSON"):
        page(replace(study, experiments=(replace(experiment, figures=(broken,)),)), "")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(OctavoError, match=r"pip install 'octavo\[plots\]'"):
        plotly_library()


# --- in a browser -------------------------------------------------------------------------------

_AXES = """[...document.querySelectorAll(".js-plotly-plot")].map((plot) => ({
  titles: [...plot.querySelectorAll(".xtitle, .ytitle")].map((title) => title.textContent),
  points: plot.querySelectorAll(".scatterlayer path, .barlayer path").length,
  wide: plot.getBoundingClientRect().width,
  ink: plot.querySelector(".xtitle").style.fill,
  colour: plot.querySelector(".scatterlayer .point, .barlayer .point path")?.style.fill,
  outside: [...plot.querySelectorAll(".xtitle, .ytitle, .legend")].filter((part) => {
    const box = part.getBoundingClientRect(), all = plot.getBoundingClientRect();
    return box.left < all.left - 1 || box.right > all.right + 1
      || box.top < all.top - 1 || box.bottom > all.bottom + 1;
  }).length,
}))"""


_READERS = (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False))


async def look(file: Path, folder: Path) -> list[tuple[list[dict[str, Any]], int, list[str]]]:
    """Open the page for every reader; return the plots, the page's width and the errors."""
    seen = []
    async with browser(folder) as tab:
        for _, width, is_dark in _READERS:
            await tab.open(file, width=width, is_dark=is_dark)
            plots = await tab.evaluate(_AXES)
            wide = await tab.evaluate("document.documentElement.scrollWidth")
            seen.append((plots, wide, list(tab.errors)))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_MISSING)
def test_chromium_draws_every_figure_in_light_dark_and_on_a_phone(
    page_file: Path, tmp_path: Path
) -> None:
    seen = asyncio.run(look(page_file, tmp_path))
    assert len(seen) == len(_READERS)
    for plots, wide, errors in seen:
        assert errors == []
        assert len(plots) == 14
        for plot in plots:
            assert len(plot["titles"]) == 2
            assert all(LABEL.fullmatch(title) for title in plot["titles"])
            assert plot["points"] > 0
            assert plot["outside"] == 0
            assert plot["wide"] <= wide
    (light, *_), (dark, *_), (_, phone_width, _) = seen
    assert light[0]["ink"] != dark[0]["ink"]
    assert light[0]["colour"] != dark[0]["colour"]
    assert phone_width == 390  # nothing makes a phone scroll sideways
