"""A model opened in this process: it plans and it answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ModelSpec
from trimmoe.experiments import answering
from trimmoe.experiments.opening import open_view, resolved
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.sample_text import sample_text
from trimmoe.facade.plan import Plan
from trimmoe.facade.token import Token
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer
from trimmoe.policy.settings import PolicySettings, exact
from trimmoe.runtime.decoder import AloneDriver
from trimmoe.runtime.generate import Driver, check_prompt
from trimmoe.runtime.launch.config import serve_config
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling

_LOG = logging.getLogger("trimmoe")
File = str | PathLike[str]


def load(
    model: File = "embedded", *, quantise: str = "none", device: str = "cpu", dtype: str = "auto"
) -> Model:
    """Open a model with all its experts.

    `model` is a checkpoint folder, a hub id or a GGUF file, or `embedded` for the small one that
    comes with the package (built on first use, from some 90 MB that are fetched once). `quantise`
    holds weights as `int8` or `int4`; `dtype` is `float32`, `bfloat16` or `auto`: float32 on a
    processor and the checkpoint's own elsewhere. Raises `UserError`.

    Examples:
        >>> import trimmoe
        >>> model = trimmoe.load("embedded")
        >>> model.spec.layer_count, model.spec.expert_count, model.spec.top_k
        (30, 8, 4)
    """
    source = str(model)
    if quantise not in list(Precision):
        raise UserError(f"Weights cannot be held as `{quantise}`; choose none, int8 or int4.")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"There is no dtype `{dtype}`; choose auto, float32 or bfloat16.")
    path = resolved(source)
    precision = Precision(quantise)
    return Model(
        source=source,
        dtype=dtype,
        quantise=precision,
        view=open_view(path, dtype, device, quantise=precision),
        tokenizer=load_tokenizer(path),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """An opened model, made by `load`."""

    source: str
    """What it was opened by: a folder, a file, a hub id or `embedded`."""
    dtype: str
    quantise: Precision
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
        method: str = "auto",
        confidence: float = 0.9,
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
        model's. `method` is one of `methods`, `confidence` what an exit that is final needs,
        `access` the server whose user asks (the first), `chat` makes the prompt a turn of a chat.
        At `temperature` 0 every token is the most probable one. Without a plan the exact model
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
        driver, server, policy = self._driver(plan, method, budget, confidence, access, seed)
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
        self,
        plan: Plan | None,
        method: str,
        budget: float | None,
        confidence: float,
        access: str | None,
        seed: int,
    ) -> tuple[Driver, int, PolicySettings]:
        """What decodes, for users of which server, under which policy."""
        if plan is None:
            if budget or access or method not in ("auto", "exact"):
                raise UserError("Only the exact model answers without a plan; give one.")
            return AloneDriver(self.view), 0, exact()
        server = answering.server_index(plan.servers, access)
        engine = plan.engine(method, budget=budget, confidence=confidence, model=self.spec)
        driver = LocalDriver(self.view, plan.profile, engine, slots=1, seed=seed)
        return driver, server, engine.settings

    def _planned(self, given: dict[str, Any]) -> Plan:
        of_model = {"model": self.source, "dtype": self.dtype, "quantise": self.quantise}
        config = serve_config(None, of_model | given)
        found = prepare(config, sample=partial(sample_text, "calibration"), say=_LOG.info)
        return Plan(model=self, profile=found.profile, placed=found.plan)
