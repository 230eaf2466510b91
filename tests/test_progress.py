"""Bars within bars: one display, whoever tracks something meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from trimmoe.progress import bars_around, track


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
