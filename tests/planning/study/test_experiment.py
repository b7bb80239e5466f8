"""What experiments are made of: units, whole tables, numbers as they are written."""

import pytest

from octavo.planning.study.experiment import (
    Axis,
    Series,
    Table,
    counted,
    listed,
    number,
    tabulate,
    ticking,
    times,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (7, "7"),
        (1234, "1,234"),
        (0.0, "0"),
        (0.001234, "0.00123"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (-1.234, "-1.23"),
        (1e-9, "0.0000000"),
        ("amx", "amx"),
    ],
)
def test_three_digits_are_written(value: float | str, written: str) -> None:
    assert number(value) == written


def test_a_ratio_with_nothing_is_not_a_number() -> None:
    assert times(3.0, 2.0) == "1.50 times"
    assert times(3.0, 0.0) == "beyond measure"


def test_counts_and_lists_are_english() -> None:
    assert (counted(1, "token"), counted(2000, "token")) == ("1 token", "2,000 tokens")
    assert (listed((1,)), listed((1, 2, 3))) == ("1", "1, 2 and 3")


@pytest.mark.parametrize(("title", "unit"), [("time", ""), ("", "s")])
def test_axis_without_title_or_unit_is_refused(title: str, unit: str) -> None:
    with pytest.raises(ValueError, match="title and a unit"):
        Axis(title=title, unit=unit)


def test_series_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="2 x, 1 y"):
        Series(name="s", x=(1, 2), y=(1.0,))
    with pytest.raises(ValueError, match="1 notes"):
        Series(name="s", x=(1, 2), y=(1.0, 2.0), notes=("one",))


def test_row_with_a_cell_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        Table(columns=("a", "b"), rows=((1, 2), (1,)))


def test_each_column_reads_every_item() -> None:
    table = tabulate([3, 1], {"n": lambda n: n, "half": lambda n: n / 2})
    assert table == Table(columns=("n", "half"), rows=((3, 1.5), (1, 0.5)))


def test_what_is_done_is_told_after_each_item_by_its_weight() -> None:
    told: list[float] = []
    before = [(item, list(told)) for item in ticking([1, 3, 4], told.append, float)]
    assert before == [(1, []), (3, [1 / 8]), (4, [1 / 8, 1 / 2])]
    assert told[-1] == 1
