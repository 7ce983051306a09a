"""Tables on narrow terminals: what is shortened, omitted and continued below."""

from __future__ import annotations

import io
import re

import pytest

from rayps.cli import show
from rayps.cli.fit_columns import Block, fit_columns

ID = "0123456789ABCDEFGHJKMNPQRS"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was printed, without the codes that make the headings bold."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())


def printed(monkeypatch: pytest.MonkeyPatch, columns: int) -> Screen:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")  # rich gives a dumb terminal 80 columns
    monkeypatch.setattr("sys.stdout", out := Screen())
    return out


def test_a_table_that_fits_is_one_block_with_its_widths() -> None:
    assert fit_columns([5, 6, 7], 22, {1: 2}, [1]) == [Block((0, 1, 2), (5, 6, 7))]


def test_columns_that_may_be_shortened_share_what_is_left() -> None:
    assert fit_columns([10, 30, 30, 10], 60, {1: 8, 2: 8}) == [Block((0, 1, 2, 3), (10, 17, 17, 10))]
    assert fit_columns([10, 9, 30, 10], 60, {1: 8, 2: 8}) == [Block((0, 1, 2, 3), (10, 9, 25, 10))]


def test_the_last_column_gets_the_rest_and_wraps() -> None:
    assert fit_columns([10, 90], 40, {}) == [Block((0, 1), (10, 28))]


def test_columns_are_omitted_only_if_the_others_do_not_fit() -> None:
    assert fit_columns([10, 20, 20], 54, {}, [1]) == [Block((0, 1, 2), (10, 20, 20))]
    assert fit_columns([10, 20, 20], 53, {}, [1]) == [Block((0, 2), (10, 20))]


def test_further_columns_continue_below_the_first() -> None:
    assert fit_columns([26, 20, 20, 9], 80, {}) == [Block((0, 1, 2), (26, 20, 20)), Block((0, 3), (26, 9))]
    assert fit_columns([26, 20, 20, 9], 80, {}, beside=[3]) == [Block((0, 1), (26, 20)), Block((0, 2, 3), (26, 20, 9))]


def test_every_column_is_shown_on_a_terminal_of_any_width() -> None:
    for room in range(1, 120):
        blocks = fit_columns([26, 9, 40, 6, 7, 8, 7, 50], room, {2: 30}, beside=[6])
        assert sorted({at for block in blocks for at in block.columns}) == list(range(8))
        assert all(block.columns[0] == 0 for block in blocks)
        if room >= 60:
            assert all(sum(block.widths) + 2 * (len(block.widths) - 1) <= room for block in blocks)


def test_a_wide_table_is_readable_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(monkeypatch, 80)
    columns = ["id", "status", "strategy", "rounds", "loss", "lowest", "accuracy", "highest", "epsilon"]
    strategy = "fedavg:fraction=0.5,privacy=dp(noise_multiplier=1.1)"
    row = [ID, "SUCCEEDED", strategy, 30, "0.2512", "0.2512", "0.9612", "0.9712", "4.353"]
    show.print_table(columns, [row, row], cut={"strategy": 30}, beside=[5, 7], wrap=True)
    lines = out.text().splitlines()
    assert max(map(len, lines)) <= 80 and out.text().count(ID) == 2 * len([each for each in lines if "id" in each])
    assert all(str(cell) in out.text().split() for cell in row if cell != strategy)
    assert "".join(line[39:74].strip() for line in lines[1:3]).startswith(strategy)  # it wraps, and is whole
    assert capsys.readouterr().err == ""


def test_what_is_omitted_is_named_and_a_pipe_gets_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ["id", "name", "workers", "result"], [[ID, "a name", "1 x fedavg:fraction=0.5", "loss 0.25  accuracy 0.9"]]
    out = printed(monkeypatch, 60)
    show.print_table(*table, cut={"workers": 16}, omit=["workers"])
    assert "fedavg" not in out.text() and "not shown on a terminal of 60 columns: workers" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout", pipe := io.StringIO())
    show.print_table(*table, cut={"workers": 16}, omit=["workers"])
    assert pipe.getvalue().splitlines()[1] == "  ".join(map(str, table[1][0])) and capsys.readouterr().err == ""


def test_columns_without_a_value_are_left_out() -> None:
    assert show.drop_empty_columns(["round", "loss", "epsilon"], [[0, "", "1.5"], [1, None, "2"]]) == (
        ["round", "epsilon"],
        [[0, "1.5"], [1, "2"]],
    )
    assert show.drop_empty_columns(["round", "loss"], []) == (["round"], [])
