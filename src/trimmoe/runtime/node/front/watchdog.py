"""The last resort against requests that hang: whoever hears nothing of a sequence asks for it.

Links report what they lose and servers whose work that was, so a sequence that nobody works at
should not exist. If one does all the same, whatever the reason, it is found here. Time alone is
no sign: where many prompts wait for a slow machine a token may take minutes. So its access server
asks around, and gives the attempt up only if no server has it in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trimmoe.runtime.node.front.jobs import Attempt


def stalled(attempts: Iterable[Attempt], ask: Callable[[int], None]) -> list[Attempt]:
    """Look once at all attempts: those that nobody has in hand.

    One without news since the last look is asked after; without an answer by the next look, it is
    returned.
    """
    given_up = []
    for attempt in attempts:
        if attempt.news:
            attempt.news = attempt.asked = False
        elif attempt.asked:
            given_up.append(attempt)
        else:
            attempt.asked = True
            ask(attempt.sequence)
    return given_up
