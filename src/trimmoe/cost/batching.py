"""What a batch takes: weights are read once for all its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimmoe.core.specs import BATCHES

BATCH_SHARE = 0.9
"""Share of a single row's time that a batch needs only once, where nothing was measured."""
_FEW = 3
"""Of `BATCHES`, the most rows that are a few."""
TOKEN_SHARE = 0.9
"""Share of what software takes for a message, and for a token beside its layers, that a batch takes
only once: waking up, and the interpreter's way around a batch. Chosen so
that four servers with 8 and 32 streams take in the simulator what they took by a clock."""
NAMING_SHARE = 0.6
"""The same of what a draft head takes to name one token more behind each of several."""

PATIENCE = 64
"""Batches that a server may begin before others that have waited; more than most models have
layers, so that tokens have time to catch up with those ahead of them."""
SLICE_S = 0.005
"""After which whatever has come meanwhile gets its turn, where several layers are passed in one."""
LAYERS_AT_ONCE = 4
"""That a guess passes between two looks at the clock."""


def batch_s(one_s: float, rows: float, times: Sequence[float]) -> float:
    """Seconds of `rows` >= 1 rows through the same weights, where one takes `one_s` and as many as
    `BATCHES` says so many `times` as long.

    Straight between and beyond these. Plain arithmetic, so that compiled loops can take it in as it
    is.
    """
    last = 1
    while last + 1 < len(BATCHES) and rows > BATCHES[last]:
        last += 1
    slope = (times[last] - times[last - 1]) / (BATCHES[last] - BATCHES[last - 1])
    return one_s * (times[last] + slope * (rows - BATCHES[last]))


def row_share(times: Sequence[float]) -> float:
    """What one more row takes over what the first one does, in batches of a few."""
    return (times[_FEW] - times[0]) / (BATCHES[_FEW] - BATCHES[0])


def shared_s(one_s: float, rows: float, share: float) -> float:
    """Seconds that software takes for `rows` >= 1 rows, where one takes `one_s`, of which it needs
    a `share` only once. Plain arithmetic likewise."""
    return one_s * (share + (1.0 - share) * rows)


def chains_s(one_s: float, named: Iterable[float], chains: float) -> float:
    """Seconds that a draft head takes for so many chains of drafts together, step by step, each of
    which goes as far as a step with the chance that `named` gives; one step of one chain takes
    `one_s`. Plain arithmetic likewise."""
    times = 0.0
    for chance in named:
        times += NAMING_SHARE * (1.0 - (1.0 - chance) ** chains)
        times += (1.0 - NAMING_SHARE) * chance * chains
    return one_s * times


def prompt_turn_s(token_turn_s: float, visits: float) -> float:
    """Seconds until tokens have their turn again, whose last one took so long: prompts have as much
    time, so that what waits for its first token soon shares the batches of all others; less where a
    token may have to wait for them at each of so many `visits`. Plain arithmetic likewise."""
    return max(SLICE_S, token_turn_s / visits)


def guess_layers(layer_s: float, left: int) -> int:
    """Layers of those `left` that a guess passes in one turn, each of which takes `layer_s`; plain
    arithmetic likewise."""
    passed = LAYERS_AT_ONCE
    while passed < left and passed * layer_s < SLICE_S:
        passed += LAYERS_AT_ONCE
    return min(passed, left)
