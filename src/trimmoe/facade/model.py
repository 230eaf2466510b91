"""A model opened in this process, which plans and answers, and its plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan as Placed
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.engine.step import Engine
from trimmoe.experiments import answering
from trimmoe.experiments.method_engines import method_engine, require_fitting
from trimmoe.experiments.methods import chosen
from trimmoe.experiments.opening import open_view, resolved
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.sample_text import sample_text
from trimmoe.facade.token import Token
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer
from trimmoe.policy.presets import exact
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.exact_decoder import AloneDriver
from trimmoe.runtime.generate import Driver, check_prompt
from trimmoe.runtime.launch.config import serve_config
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOG = logging.getLogger("trimmoe")
File = str | PathLike[str]


def load(
    model: File = "embedded",
    *,
    choice: Choice | None = None,
    quantise: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> Model:
    """Open a model with all its experts.

    `model` is a checkpoint folder, a hub id or a GGUF file, or `embedded` for the small one that
    comes with the package (built on first use, from some 90 MB that are fetched once). `choice`
    says in how many bits weights are held, and what `generate` and `simulate` go by where they are
    not told; `quantise`, `int8` or `int4`, overrides the bits. `dtype` is `float32`, `bfloat16` or
    `auto`: float32 on a processor and the checkpoint's own elsewhere. Raises `UserError`.

    Examples:
        >>> import trimmoe
        >>> model = trimmoe.load("embedded")
        >>> model.spec.layer_count, model.spec.expert_count, model.spec.top_k
        (30, 8, 4)
    """
    source, choice = str(model), (choice or Choice()).overridden(quantise=quantise)
    if choice.quantise not in list(Precision):
        raise UserError(
            f"Weights cannot be held as `{choice.quantise}`; choose none, int8 or int4."
        )
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"There is no dtype `{dtype}`; choose auto, float32 or bfloat16.")
    path = resolved(source)
    precision = Precision(choice.quantise)
    return Model(
        source=source,
        dtype=dtype,
        choice=replace(choice, quantise=precision),
        view=open_view(path, dtype, device, quantise=precision),
        tokenizer=load_tokenizer(path),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """An opened model, made by `load`."""

    source: str
    """What it was opened by: a folder, a file, a hub id or `embedded`."""
    dtype: str
    choice: Choice
    """How its weights are held, and what `generate` and `simulate` go by where less is said."""
    view: MoEView = field(repr=False)
    """Its layers, one by one."""
    tokenizer: Any = field(repr=False)
    """Its tokenizer, as transformers has it."""

    @property
    def spec(self) -> ModelSpec:
        """Layers, experts and sizes."""
        return self.view.spec

    def plan(
        self,
        cluster: File = "local4",
        *,
        profile: File | None = None,
        text: Sequence[File] = (),
        machines: File | None = None,
    ) -> Plan:
        """Place the experts on the servers of `cluster` and choose the routes.

        `cluster` is a cluster file or the name of a sample (`sample_clusters`). Profile and plan
        are those that were made before for the same model, text and cluster, or are made now and
        kept, as `trimmoe serve` does; the embedded model brings its profile. Calibrating another
        one takes minutes and runs on the files in `text`, or on prose that every Python carries.
        `machines` is what `trimmoe probe` measured. Raises `UserError`.

        Examples:
            >>> import trimmoe
            >>> plan = trimmoe.load("embedded").plan("local4")
            >>> len(plan.servers)
            4
        """
        given = {"cluster": Path(cluster), "machines": machines, "text": list(text) or None}
        return self._planned({**given, "profile": profile})

    def load_plan(self, path: File, *, profile: File | None = None) -> Plan:
        """A plan that `trimmoe plan` or `Plan.save` wrote, with the profile it was made from.
        Raises `UserError` if they do not belong together."""
        return self._planned({"plan": path, "profile": profile})

    def generate(
        self,
        prompt: str,
        *,
        plan: Plan | None = None,
        budget: float | None = None,
        method: str | None = None,
        confidence: float | None = None,
        access: str | None = None,
        chat: bool = False,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[Token]:
        """Continue `prompt`, token by token, as the servers of `plan` would.

        Everything runs in this process; what links and machines would take is charged by the cost
        model. With `budget`, the flip rate that a token may lose on average, layers and experts
        that are not worth their hop are trimmed within it; without one the answer is the exact
        model's. `method` is one of `methods`, `auto` by default, and `confidence` what an exit that
        is final needs, 0.9 by default, unless the model's `choice` says otherwise. `access` is the
        server whose user asks (the first), `chat` makes the prompt a turn of a chat. At
        `temperature` 0 every token is the most probable one. Without a plan the exact model
        answers, from one place. Raises `UserError`.

        Examples:
            >>> import trimmoe
            >>> model = trimmoe.load("embedded")
            >>> prompt = "An operator is a symbol that tells the program to"
            >>> exact = [token.id for token in model.generate(prompt, max_tokens=8)]
            >>> plan = model.plan("local4")
            >>> tokens = list(model.generate(prompt, plan=plan, max_tokens=8))
            >>> [token.id for token in tokens] == exact
            True
            >>> sum(token.spent for token in tokens)
            0.0
        """
        if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise UserError(
                "An answer has at least 1 token, a temperature of at least 0 and a top_p in (0, 1]."
            )
        ids = answering.prompt_ids(self.tokenizer, prompt, chat)
        check_prompt(ids, self.spec.context_length)
        choice = self.choice.overridden(budget=budget, method=method, confidence=confidence)
        driver, server, policy = self._driver(plan, choice, access, seed)
        pieces = answering.answer(
            driver,
            self.tokenizer,
            ids,
            access=server,
            policy=policy,
            max_new_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        )
        return map(Token.of, pieces)

    def _driver(
        self, plan: Plan | None, choice: Choice, access: str | None, seed: int
    ) -> tuple[Driver, int, PolicySettings]:
        """What decodes, for users of which server, under which policy."""
        if plan is None:
            if choice.budget or access or choice.method not in ("auto", "exact"):
                raise UserError("Only the exact model answers without a plan; give one.")
            return AloneDriver(self.view), 0, exact()
        server = answering.server_index(plan.servers, access)
        engine = plan.engine(choice, model=self.spec)
        driver = LocalDriver(self.view, plan.profile, engine, slots=1, seed=seed)
        return driver, server, engine.settings

    def _planned(self, given: dict[str, Any]) -> Plan:
        held = self.choice.quantise
        of_model = {"model": self.source, "dtype": self.dtype, "quantise": held}
        config = serve_config(None, of_model | given)
        found = prepare(config, sample=partial(sample_text, "calibration"), say=_LOG.info)
        return Plan(model=self, profile=found.profile, placed=found.plan)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Who holds which experts, and on which route each server's users run; from `Model.plan`.

    Examples:
        >>> import trimmoe
        >>> plan = trimmoe.load("embedded").plan("local4")
        >>> plan.servers
        ('desk', 'shelf', 'attic', 'cellar')
        >>> plan.save("plan.trim")
        >>> trimmoe.load("embedded").load_plan("plan.trim").placed.hash == plan.placed.hash
        True
    """

    model: Model
    profile: Profile = field(repr=False)
    """What calibration measured of the model."""
    placed: Placed = field(repr=False)
    """Hosts [M, N, E] and routes [M, N] on the cluster: M servers, N MoE layers, E experts."""
    _engines: dict[Choice, Engine] = field(default_factory=dict, repr=False)
    """Those made so far; their tables take seconds."""

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers; users talk to the first unless another is named."""
        return self.placed.cluster.server_names

    @property
    def expected_s(self) -> dict[str, float]:
        """Seconds that a token takes, executed exactly and without load, by its user's server."""
        from trimmoe.experiments.explain import plan_figures

        route_s = plan_figures(self.placed, self.profile, self.model.spec).route_s
        return dict(zip(self.servers, route_s.tolist(), strict=True))

    def save(self, path: File) -> None:
        """Write the plan for `trimmoe serve --plan` and its like; `plan.profile.save` writes what
        goes with it. Raises `UserError`."""
        self.placed.save(Path(path))

    def plot(self, path: File | None = None) -> Figure:
        """The heat map of experts by server and layer, with a dot where tokens run; also written
        to `path` as a PNG if one is given. Raises `UserError`."""
        from trimmoe.experiments.plots import plan_picture, plot_plan

        if path is not None:
            plot_plan(self.placed, Path(path))
        return plan_picture(self.placed)

    def record(self, text: Sequence[File] = (), *, tokens: int = 1024) -> Trace:
        """What so many tokens of a text do at every layer, and what each server would guess of
        them by itself: what `simulate` replays. Made once and kept. Without files in `text` it is
        prose that every Python carries and that no profile was made from. Raises `UserError`."""
        from trimmoe.experiments.recording import recorded

        model = self.model
        return recorded(
            model.view, model.tokenizer, self.profile, self.placed, tuple(map(Path, text)), tokens
        )

    def engine(self, choice: Choice, *, model: ModelSpec) -> Engine:
        """What decides, as `Model.generate` runs it. Raises `UserError` for an unknown method, and
        for another model than the plan's."""
        method, policy = chosen(choice)
        require_fitting(self.profile, self.placed, model)
        if choice not in self._engines:
            self._engines[choice] = method_engine(method, self.placed, self.profile, model, policy)
        return self._engines[choice]
