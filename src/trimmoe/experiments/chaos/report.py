"""What a run says: a line per failure, and what processes took at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimmoe.experiments.chaos.run import Outcome, Result
from trimmoe.experiments.chaos.stage import Usage
from trimmoe.experiments.chaos.streams import PROMPTS

_SETTLING = 2
"""First samples of a process that do not count: it fills its caches."""
_NOISE_MB, _NOISE = 16.0, 8
"""What memory and descriptors (or threads) may differ by and still be flat."""
HEADER = f"{'failure':42} {'answers':>9} {'silence':>9} {'healthy':>9}"


def line(outcome: Outcome) -> str:
    """One failure."""
    back = "never" if outcome.healthy_s is None else f"{outcome.healthy_s:.1f} s"
    answers = f"{outcome.right} of {len(PROMPTS)}"
    silence = f"{outcome.silence_s:.1f} s"
    told = f"{outcome.title:42} {answers:>9} {silence:>9} {back:>9}"
    more = "; ".join((*outcome.faults, *outcome.notes))
    return f"{told}  ({more})" if more else told


def growth(result: Result) -> Iterable[str]:
    """What every process took, that lived long enough to say."""
    for (name, pid), samples in result.samples.items():
        if len(samples) > _SETTLING + 1:
            yield _grown(f"{name} ({pid})", samples[_SETTLING:])


def _grown(process: str, samples: Sequence[Usage]) -> str:
    first, last = samples[0], samples[-1]
    flat = (
        last.memory_mb - first.memory_mb < _NOISE_MB
        and last.descriptors - first.descriptors < _NOISE
        and last.threads - first.threads < _NOISE
    )
    return (
        f"{process:20} {first.memory_mb:.0f} to {last.memory_mb:.0f} MB, {first.descriptors} to "
        f"{last.descriptors} descriptors, {first.threads} to {last.threads} threads over "
        f"{len(samples)} looks: {'flat' if flat else 'growing'}"
    )
