"""What there is to choose from by name."""

from __future__ import annotations

from trimmoe.core.sample_clusters import sample_names, sample_summary
from trimmoe.experiments.methods import METHODS


def sample_clusters() -> dict[str, str]:
    """The clusters that come with the package, each with what it is.

    Examples:
        >>> import trimmoe
        >>> trimmoe.sample_clusters()["single"]
        'One server that holds the whole model.'
    """
    return {name: sample_summary(name) for name in sample_names()}


def methods() -> dict[str, str]:
    """The ways to run a model that `generate` and `simulate` know, each with its title.

    `auto` is the default: lossless, and within a quality budget if one is given. `exact` changes
    nothing, `speculative` guesses ahead, `trimmoe` trims; the others are baselines and ablations.

    Examples:
        >>> import trimmoe
        >>> trimmoe.methods()["exact"]
        'exact nearest'
    """
    return {name: method.title for name, method in METHODS.items()}
