"""What a supervisor says and does about servers that start, die, come back, fail or hang."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from launching import status
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.signals import stop_on_signal
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.launch.supervise import Patience, Supervisor

Answer = ServerStatus | ServerGone | None
SERVING, STARTING = status(), status(Phase.STARTING)
GONE = ServerGone("its process ended")


class Fake:
    """Gives one answer after the other, the last one again and again."""

    def __init__(self, name: str, *answers: Answer) -> None:
        self.name = name
        self._answers = list(answers)
        self.restarts, self.calls = 0, []

    def status(self, patience_s: float) -> ServerStatus | None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ServerGone):
            raise answer
        return answer

    def restart(self) -> None:
        self.restarts += 1

    def drain(self) -> None:
        self.calls.append("drain")

    def stop(self, patience_s: float) -> None:
        self.calls.append("stop")

    def kill(self, patience_s: float) -> None:
        self.calls.append(f"kill {patience_s:g}")


class Looks(threading.Event):
    """Stops after so many waits, and lets a second pass with each, without waiting."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left, self.now_s = count, 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += 1.0
        self.left -= 1
        if self.left < 0:
            self.set()
        return self.is_set()


def supervisor(
    *fakes: Fake, looks: int = 10, clock: Callable[[], float] | None = None
) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    stopping = Looks(looks)
    made = Supervisor(
        fakes,
        say=said.append,
        stopping=stopping,
        patience=Patience(ready_s=6.0, hung_s=3.0, ill_s=3.0, again_s=5.0, stop_s=2.0),
        clock=clock or (lambda: stopping.now_s),
    )
    return made, said


def test_ready_once_all_take_requests() -> None:
    slow = Fake("b", None, STARTING, status(healthy=False), SERVING)
    made, said = supervisor(Fake("a", SERVING), slow)
    assert made.wait_ready()
    assert made.statuses == {"a": SERVING, "b": SERVING}
    assert said == []


def test_told_to_stop_while_starting() -> None:
    made, _ = supervisor(Fake("a", STARTING), looks=2)
    assert not made.wait_ready()


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ((STARTING, GONE), r"process of server b ended while it was starting"),
        ((STARTING, status(Phase.STARTING, pid=2)), "ended while it was starting"),
        ((status(Phase.STOPPED),), "stopped while it was starting"),
        (
            (ServerStatus(phase=Phase.FAILED, pid=1, error="The port 1 is in use; free it."),),
            "The port 1 is in use; free it.",
        ),
        ((STARTING,), r"b was not ready after 6 s \(is starting\)"),
        ((None,), r"b was not ready after 6 s \(does not answer\)"),
        (
            (ServerStatus(phase=Phase.SERVING, pid=1, reason="a is lost"),),
            r"not ready after 6 s \(a is lost\)",
        ),
    ],
)
def test_what_fails_at_the_start_is_one_sentence(
    answers: tuple[Answer, ...], sentence: str
) -> None:
    made, _ = supervisor(Fake("a", SERVING), Fake("b", *answers))
    with pytest.raises(UserError, match=sentence):
        made.wait_ready()


def test_lost_and_back_are_said_once_each() -> None:
    fake = Fake("b", SERVING, GONE, GONE, None, status(Phase.STARTING, pid=2), status(pid=2))
    made, said = supervisor(Fake("a", SERVING), fake)
    made.watch()
    assert said == ["Server b is lost and is being started again.", "Server b is back."]
    assert fake.restarts == 0, "whoever started it starts it again"


def test_a_death_between_two_looks_is_noticed_by_the_process_number() -> None:
    made, said = supervisor(Fake("b", SERVING, status(pid=2)))
    made.watch()
    assert said == ["Server b was lost and is being started again.", "Server b is back."]


def test_a_server_that_hangs_is_replaced() -> None:
    fake = Fake("b", SERVING, None, None, None, None, None, status(pid=2))
    made, said = supervisor(fake)
    made.watch()
    assert fake.restarts == 1
    assert said == ["Server b does not answer and is replaced.", "Server b is back."]


def test_a_short_silence_is_no_hang() -> None:
    fake = Fake("b", SERVING, None, None, SERVING, None, None, SERVING)
    made, said = supervisor(fake)
    made.watch()
    assert (fake.restarts, said) == (0, [])


def test_a_server_that_fails_is_tried_again_but_not_all_the_time() -> None:
    fake = Fake("b", ServerStatus(phase=Phase.FAILED, pid=1, error="No memory."))
    made, said = supervisor(fake, looks=12)
    made.watch()
    assert said == ["No memory. Trying again."]
    assert fake.restarts == 3  # at 1, 6 and 11 seconds


def test_a_server_that_answers_but_takes_no_requests_is_replaced() -> None:
    ill = status(healthy=False)
    fake = Fake("b", SERVING, *[ill] * 5, status(Phase.STARTING, pid=2), status(pid=2))
    made, said = supervisor(fake)
    made.watch()
    assert fake.restarts == 1
    assert said == ["Server b takes no requests and is replaced.", "Server b is back."]


def test_a_short_illness_passes() -> None:
    ill = status(healthy=False)
    fake = Fake("b", SERVING, ill, ill, ill, SERVING, ill, ill, ill, SERVING)
    made, said = supervisor(fake)
    made.watch()
    assert (fake.restarts, said) == (0, [])


def test_a_second_signal_hurries_only_what_may_be_hurried() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)  # Clearing up goes on.
        finished = False
        with stop.hurried():
            signal.raise_signal(signal.SIGTERM)
            finished = True
        assert not finished
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_are_asked_to_stop_before_any_is_ended() -> None:
    order: list[str] = []
    fakes = [Fake(name, SERVING) for name in "ab"]
    for fake in fakes:
        fake.calls = order
    made, _ = supervisor(*fakes, clock=lambda: 7.0)
    made.stop()
    assert order == ["stop", "stop", "kill 2", "kill 2"]
