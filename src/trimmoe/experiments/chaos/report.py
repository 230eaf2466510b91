"""What a run says: a line per failure, and what processes took in the course of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trimmoe.core.specs import FloatArray
from trimmoe.experiments.chaos.run import Outcome, Result
from trimmoe.experiments.chaos.stage import Usage

_FIRST = 2
"""Samples of a process that do not count: it fills its caches."""
_LEAST = 3
_NOISE_SHARE, _NOISE_MB, _NOISE = 0.01, 16.0, 8.0
"""What memory and descriptors (or threads) may differ by and still be flat."""
_SCATTER = 2.0
"""Standard deviations from its own straight line that memory may differ by and still be flat."""
HEADER = f"{'failure':42} {'answers':>9} {'silence':>9} {'healthy':>9}"


def line(outcome: Outcome) -> str:
    """One failure."""
    back = "never" if outcome.healthy_s is None else f"{outcome.healthy_s:.1f} s"
    answers = f"{outcome.right} of {outcome.asked}"
    silence = f"{outcome.silence_s:.1f} s"
    told = f"{outcome.title:42} {answers:>9} {silence:>9} {back:>9}"
    more = "; ".join((*outcome.faults, *outcome.notes))
    return f"{told}  ({more})" if more else told


def growth(result: Result) -> Iterable[str]:
    """What every process took, that lived long enough to say."""
    for (name, pid), samples in result.samples.items():
        begun_s = samples[0].at_s + result.settling_s
        settled = [each for each in samples[_FIRST:] if each.at_s >= begun_s]
        if len(settled) >= _LEAST:
            yield _grown(f"{name} ({pid})", settled)


def _grown(process: str, samples: Sequence[Usage]) -> str:
    at_s = np.array([each.at_s for each in samples])
    minutes = (at_s - at_s[0]) / 60
    memory_mb = np.array([each.memory_mb for each in samples])
    slope, off_mb = _line(minutes, memory_mb)
    grown_mb = slope * minutes[-1]
    others = {
        "descriptors": np.array([float(each.descriptors) for each in samples]),
        "threads": np.array([float(each.threads) for each in samples]),
    }
    noise_mb = max(_NOISE_MB, _NOISE_SHARE * memory_mb.mean(), _SCATTER * off_mb)
    flat = grown_mb < noise_mb and all(_more(each) < _NOISE for each in others.values())
    counts = ", ".join(f"{each[0]:.0f} to {each[-1]:.0f} {name}" for name, each in others.items())
    return (
        f"{process:22} {memory_mb[0]:.0f} to {memory_mb[-1]:.0f} MB, {slope:+.2f} MB a minute, "
        f"{counts} in {minutes[-1]:.0f} minutes: {'flat' if flat else 'growing'}"
    )


def _more(counts: FloatArray) -> float:
    """How many more there are in the last quarter than in the first, but for short bursts: clients
    have connections."""
    quarter = -(-len(counts) // 4)
    return float(np.median(counts[-quarter:]) - np.median(counts[:quarter]))


def _line(minutes: FloatArray, values: FloatArray) -> tuple[float, float]:
    """The slope of the straight line through values, per minute, and how far they are off it."""
    if minutes[-1] <= 0:
        return 0.0, 0.0
    slope, start = np.polyfit(minutes, values, 1)
    return float(slope), float(np.std(values - slope * minutes - start))
