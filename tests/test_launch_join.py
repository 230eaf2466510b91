"""A machine that joins a head, both on this one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from joining import NAMES, Cluster, Stream
from launching import await_answer
from serve_soon import FULL
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.folder import RunFolder

pytestmark = pytest.mark.slow


def test_a_head_serves_with_those_that_join_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes with another token is not let in, and disturbs nobody."""
    cluster = Cluster(tmp_path, monkeypatch)
    with cluster.head() as first:
        first.said(f"Waiting at {cluster.at} for attic")
        with cluster.joined() as second, cluster.joined("wrong-token") as refused:
            second.said("Joined")
            first.said("Ready")
            assert refused.ended() == 2
            assert "does not let this machine in" in refused.text
            for index in range(len(NAMES)):
                await_answer(cluster.port + index)
            cluster.opens_what_check_says(first)
            started = family.descendants(first.process.pid)
            below = family.descendants(second.process.pid)
            assert cluster.pid(1) in {process.pid for process in below}, "it runs where it joined"
            first.process.send_signal(signal.SIGINT)
            assert first.ended() == 0
            assert second.ended() == 0
            assert "The head ended the cluster." in second.text
    assert family.alive(started | below) == frozenset()


def test_whoever_joins_is_planned_for_and_no_answer_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster file. Answers are under way while a machine joins and the plan changes thrice,
    once between plans of both."""
    cluster = Cluster(tmp_path, monkeypatch)
    prompt, length = [5, 9, 77, 31], 200
    with cluster.open_head() as first:
        first.said("until 1 servers are there")
        first.said("Ready")
        streams = [Stream(cluster.port, prompt, length)]
        first.said("Serving by what was measured of desk")
        with cluster.joined() as second:
            streams.append(Stream(cluster.port, prompt, length))
            await_answer(cluster.port + 1)
            streams.append(Stream(cluster.port + 1, prompt, length))
            first.said("Serving by what was measured of desk, attic")
            streams.append(Stream(cluster.port + 1, prompt, length))
            answers = [stream.tokens() for stream in streams]
            first.process.send_signal(signal.SIGINT)
            assert [each.ended() for each in (first, second)] == [0, 0]
    assert answers == [cluster.greedy(prompt, length)] * len(streams)
    assert not any(RunFolder.at(cluster.port, turn).alive() for turn in (0, 1))


def test_without_memory_for_two_plans_the_measured_one_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way is answered before. Later plans are not moved to."""
    monkeypatch.setenv(FULL, "1")
    cluster = Cluster(tmp_path, monkeypatch)
    prompt, length = [5, 9, 77, 31], 200
    with cluster.open_head() as first:
        first.said("Ready")
        stream = Stream(cluster.port, prompt, length)
        first.said("There is no memory for two plans at once at desk")
        first.said("Serving by what was measured of desk")
        assert not RunFolder.at(cluster.port, 0).alive()
        answers = [stream.tokens(), Stream(cluster.port, prompt, length).tokens()]
        with cluster.joined() as second:
            first.said("The plan stays as it is: A better plan needs more memory")
            answers.append(Stream(cluster.port, prompt, length).tokens())
            first.process.send_signal(signal.SIGINT)
            assert [each.ended() for each in (first, second)] == [0, 0]
    assert answers == [cluster.greedy(prompt, length)] * len(answers)
