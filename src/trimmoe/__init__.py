"""TrimMoE: distributed Mixture-of-Experts inference that removes the hops a token does not need.

    import trimmoe

    model = trimmoe.load("embedded")
    plan = model.plan("local4")
    for token in model.generate("An operator is", plan=plan, budget=0.02):
        print(token.text, end="")
    trimmoe.simulate(plan, rate=20).plot("load.png")

Everything here is imported when it is first asked for, so that `import trimmoe` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimmoe.core.choice import Choice
    from trimmoe.core.errors import UserError
    from trimmoe.core.ledger import Kind
    from trimmoe.core.precision import Precision
    from trimmoe.core.profile import Profile
    from trimmoe.core.trace import Trace
    from trimmoe.facade.model import Model, Plan, load
    from trimmoe.facade.names import methods, sample_clusters
    from trimmoe.facade.simulation import Simulation, simulate
    from trimmoe.facade.token import Token

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "Kind",
    "Model",
    "Plan",
    "Precision",
    "Profile",
    "Simulation",
    "Token",
    "Trace",
    "UserError",
    "__version__",
    "load",
    "methods",
    "sample_clusters",
    "simulate",
]

_MODULES = {
    "Choice": "core.choice",
    "Kind": "core.ledger",
    "Model": "facade.model",
    "Plan": "facade.model",
    "Precision": "core.precision",
    "Profile": "core.profile",
    "Simulation": "facade.simulation",
    "Token": "facade.token",
    "Trace": "core.trace",
    "UserError": "core.errors",
    "load": "facade.model",
    "methods": "facade.names",
    "sample_clusters": "facade.names",
    "simulate": "facade.simulation",
}
"""Where each name is defined; modules are named as strings, for nothing may import the facade but
whoever uses it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
