"""Who competes: methods with the placement and the accounting they are run under.

Three arenas, kept apart because they answer different questions:

- `letter`: as the paper seems to have run it. The authors' own schemes move their tokens
  (`migrate`, not physical), and so does EdgeShard's placement expert by expert, which nobody would
  run with a return after every layer; that, and EdgeShard as published, stand beside it. All others
  dispatch from home and return.
- `moving`: every scheme moves its tokens, the same fiction for everybody.
- `pinned`: what can be built. Baselines once on the placement they come with, once on our plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from trimmoe.cost.model import Accounting
from trimmoe.experiments.methods import METHODS, Method
from trimmoe.policy.settings import PolicySettings

OURS = "trimmoe"
EXACT = "exact"
GUESSED = "speculative"
"""Exact execution, too, of tokens that users' servers guess ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of a figure."""

    key: str
    """Unique among all contenders."""
    title: str
    method: Method
    on: Literal["ours", "paper"] = "ours"
    """The plan it runs on, unless its method brings a placement of its own."""
    change: Callable[[PolicySettings], PolicySettings] = lambda policy: policy
    """Applied last, so that it overrides the method's settings."""
    of: str = ""
    """The paper's name for it, by which claims are looked up."""

    @property
    def lossless(self) -> bool:
        """Whether every token runs all its experts in all layers."""
        return self.method.policy is None and self.method.settings().levers.lossless


def moving(policy: PolicySettings) -> PolicySettings:
    """The same policy where tokens move for free; not physical."""
    return policy.under(Accounting.MIGRATE)


def whole_requests(policy: PolicySettings) -> PolicySettings:
    """The same policy on tokens of prompts too, as the paper's own has it."""
    return policy.but(prompts_trimmed=True)


def _row(
    arena: str, name: str, of: str = "", title: str | None = None, **settings: object
) -> Contender:
    method = METHODS[name]
    key = f"{arena}/{name}"
    shown = method.title if title is None else title
    return Contender(key=key, title=shown, method=method, of=of, **settings)  # type: ignore[arg-type]


def letter() -> tuple[Contender, ...]:
    """As the paper seems to have run it."""
    return (
        _moved_edgeshard(),
        *_beside_edgeshard(),
        *(row if row.lossless else _under("letter", row, whole_requests) for row in _at_home()),
        _row(
            "letter",
            "paper-substitute-only",
            "substitute-only",
            "Substitute-Only (migrate)",
            on="paper",
        ),
        _row("letter", "paper", OURS, "TrimMoE, paper's preset (migrate)", on="paper"),
    )


def _moved_edgeshard() -> Contender:
    title = "EdgeShard (expert-wise, migrate)"
    return _row("moving", "edgeshard-experts", "edgeshard", title, change=moving)


def _beside_edgeshard() -> tuple[Contender, ...]:
    """EdgeShard in its other forms."""
    return (
        _row("pinned", "edgeshard", "edgeshard-native", "EdgeShard (native)"),
        _row("letter", "edgeshard-experts", "edgeshard-home", "EdgeShard (expert-wise, returning)"),
    )


def _at_home() -> tuple[Contender, ...]:
    """The paper's other baselines; of those that approximate also what they are at the quality
    that ours keeps to."""
    return (
        _row("letter", "slimcaching", "slimcaching"),
        _row("own", "moe2", "moe2", on="paper"),
        _row("own", "moe2-matched", "moe2-matched", on="paper"),
        _row("own", "mixture-of-depths", "mod", on="paper"),
        _row("own", "mixture-of-depths-matched", "mod-matched", on="paper"),
    )


def _under(
    arena: str, row: Contender, change: Callable[[PolicySettings], PolicySettings]
) -> Contender:
    """A row with the settings of another arena."""
    _, name = row.key.split("/")
    return replace(row, key=f"{arena}/{name}", change=change)


def moving_all() -> tuple[Contender, ...]:
    """The same with every scheme moving its tokens."""
    rows = [_under("moving", row, lambda one: moving(whole_requests(one))) for row in _at_home()]
    theirs = (row for row in letter() if row.of in ("substitute-only", OURS))
    return (_moved_edgeshard(), *rows, *theirs)


_AS_EDGESHARD = {"edgeshard-native": "edgeshard"}
"""Where nobody moves, claims about EdgeShard are looked up by its native form."""


def pinned_own() -> tuple[Contender, ...]:
    """Physical, the paper's baselines on the placements they come with."""
    return (
        *(replace(row, of=_AS_EDGESHARD.get(row.of, row.of)) for row in _beside_edgeshard()),
        *_at_home(),
        _row("own", "substitute-only-1", "substitute-only", "Substitute-Only (home)", on="paper"),
        _row("pinned", "trimmoe", OURS),
    )


def pinned_best() -> tuple[Contender, ...]:
    """Physical, EdgeShard native, all that needs a placement on ours."""
    return (
        _row("pinned", "pipeline", "pipeline"),
        _row("pinned", "edgeshard", "edgeshard"),
        _row("pinned", "edgeshard-throughput"),
        _row("pinned", "activation-aware"),
        _row("pinned", "load-balanced"),
        _row("pinned", "exact", EXACT, "exact, our plan"),
        _row("pinned", "mixture-of-depths", "mod", "Mixture-of-Depths, our plan"),
        _row("pinned", "local-prior", "local-prior", "Local-Prior, our plan"),
        _row("pinned", "moe2", "moe2", "MoE^2, our plan"),
        _row("pinned", "mixture-of-depths-matched", "mod-matched"),
        _row("pinned", "moe2-matched", "moe2-matched"),
        _row("pinned", "substitute-only", "substitute-only", "Substitute-Only, our plan"),
        _row("pinned", "trimmoe", OURS),
        _row("pinned", "speculative", GUESSED, "TrimMoE, speculative"),
    )


ARENAS: dict[str, Callable[[], tuple[Contender, ...]]] = {
    "letter": letter,
    "moving": moving_all,
    "pinned_own": pinned_own,
    "pinned_best": pinned_best,
}
ARENA_TITLES = {
    "letter": "as the paper seems to have run it (ours, its predecessor and EdgeShard migrate: not "
    "physical)",
    "moving": "every scheme under migrate (not physical)",
    "pinned_own": "pinned, baselines on their own placements",
    "pinned_best": "pinned, native EdgeShard, baselines on our plan",
}


def everybody() -> tuple[Contender, ...]:
    """All contenders of all arenas, once each."""
    return tuple({row.key: row for arena in ARENAS.values() for row in arena()}.values())
