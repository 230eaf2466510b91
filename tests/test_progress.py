"""Bars within bars: one display, whoever tracks something meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from trimmoe.progress import Bars, bars_around, bytes_bar, progress_line, track


def test_whatever_is_tracked_within_has_its_bar_beneath_while_it_lasts() -> None:
    with bars_around() as bars:
        bars.add_task("whole", total=2)
        seen = []
        for each in track([1, 2, 3], "part"):
            seen.append((each, [task.description for task in bars.tasks], bars.tasks[1].total))
        assert seen == [(each, ["whole", "part"], 3) for each in (1, 2, 3)]
        assert [task.description for task in bars.tasks] == ["whole"]


def test_a_bar_is_taken_away_where_its_work_is_left_off() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    with bars_around() as bars:
        for _ in (tracked := track(endless(), "part")):
            break
        tracked.close()
        assert not bars.tasks


def test_nothing_is_around_when_it_is_over() -> None:
    with bars_around() as bars:
        pass
    assert list(track([1, 2], "later")) == [1, 2]
    assert not bars.tasks


def test_where_nobody_sees_bars_lines_say_how_far_all_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bars(line_every_s=0.01) as bars:
        bars.add_task("Not begun", start=False, total=3)
        task = bars.add_task("Echoes", total=4)
        bars.advance(task, 3)
        seen = ""
        for _ in range(500):
            time.sleep(0.01)
            seen += capsys.readouterr().err
            if "left\n" in seen:
                break
    assert seen.startswith("Echoes: 75 %, 0:00:0")
    assert "Not begun" not in seen
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "it went on after its end"


def test_what_is_done_or_not_to_be_shown_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars(line_every_s=0.005) as done, Bars(line_every_s=0.005, shown=False) as hidden:
        done.add_task("done", total=1, completed=1)
        hidden.add_task("hidden", total=2)
        time.sleep(0.05)
        assert progress_line(done.tasks) == ""
    assert capsys.readouterr().err == ""


def test_bytes_are_shown_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trimmoe.progress.Bars", partial(Bars, line_every_s=0.005))
    with bytes_bar("Few", 100) as advance:
        advance(50)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    with bytes_bar("Many", 4 << 30) as advance:
        advance(1 << 30)
        time.sleep(0.05)
    assert "Many: 25 %" in capsys.readouterr().err


def test_what_has_no_known_end_is_named() -> None:
    with Bars(shown=False) as bars:
        bars.add_task("Reading the source model", total=None)
        assert progress_line(bars.tasks) == "Reading the source model ..."
