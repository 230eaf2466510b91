"""Profile and plan of a cluster: those given, those made before, or made now and kept.

What is made is kept under the cache folder by a hash of everything it follows from, so that
a second start finds it and a changed model, text, setting or cluster does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import trimmoe
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.text import read_texts, text_hash
from trimmoe.core.artifact import file_hash
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.errors import UserError
from trimmoe.core.machines import load_machines
from trimmoe.core.plan import PLAN_FORMAT, Plan, load_plan
from trimmoe.core.profile import PROFILE_FORMAT, Profile, load_profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.experiments.methods import chosen
from trimmoe.experiments.opening import open_to_calibrate
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.models.embedded.shipped import SHIPPED_DTYPE, shipped_profile
from trimmoe.placement.make import PLANNER, PlanSettings, default, make_plan
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.placement.survive import surviving
from trimmoe.progress import track
from trimmoe.runtime.launch.artifacts import Artifacts, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.model import EMBEDDED, model_folder

Artifact = TypeVar("Artifact", Profile, Plan, Trace)
Say = Callable[[str], None]
"""Told one line for the operator."""
TRIMMED_SHARE = 0.18
"""Memory for copies where a plan is to trim, as a share of all experts in single precision."""


def prepare(
    config: ServeConfig,
    *,
    sample: Callable[[], str],
    say: Say,
    cache_dir: Path | None = None,
    placed: PlanSettings | None = None,
) -> Artifacts:
    """Profile and plan for `config`; `sample` gives the text to calibrate on where none is named.
    Where no plan is, it is searched for, or made as `placed` says.

    Raises `UserError` where something is missing or does not belong together.
    """
    folder = cache_dir or default_cache_dir()
    path = model_folder(config.model)
    model = model_spec_of(config)
    profile = _profile(config, path, model, sample, folder, say)
    profile.require_model(model)
    if placed is not None and config.plan is None:
        plan = _made(config, profile, model, placed)
    else:
        plan = _plan(config, profile, model, folder, say)
    plan = replace(plan, cluster=_as_measured(config, plan.cluster, model))
    if not plan.is_of(profile):
        raise UserError(
            "The plan was made from another profile; run `trimmoe plan` with this profile, or "
            "leave out --plan."
        )
    return Artifacts(profile=profile, plan=plan, model=model)


def profile_of(
    config: ServeConfig, model: ModelSpec, sample: Callable[[], str], say: Say
) -> Profile:
    """The profile that is given, kept, or made now, as in `prepare`. Raises `UserError`."""
    path = model_folder(config.model)
    profile = _profile(config, path, model, sample, default_cache_dir(), say)
    profile.require_model(model)
    return profile


def _as_measured(config: ServeConfig, cluster: ClusterSpec, model: ModelSpec) -> ClusterSpec:
    """The cluster with what was measured of its machines, if anything was. Raises `UserError`."""
    if config.machines is None:
        return cluster
    return load_machines(config.machines).applied(cluster, model, config.quantise)


def _profile(
    config: ServeConfig,
    path: str,
    model: ModelSpec,
    sample: Callable[[], str],
    folder: Path,
    say: Say,
) -> Profile:
    if config.profile is not None:
        return load_profile(config.profile)
    if config.model == EMBEDDED:
        why = _made_anew_because(config)
        shipped = load_profile(shipped_profile(folder)) if not why else None
        if shipped is not None and shipped.model_hash == model.model_hash:
            return shipped
        say(f"The profile that comes with {EMBEDDED} {why or 'is of another build of it'}.")
    texts = read_texts(config.text) if config.text else [sample()]
    settings = CalibrationSettings(
        tokens=config.calibration_tokens,
        budget=config.choice.allowed,
        # Calibration knows confidences between zero and one only; beyond, nothing or all exits.
        confidence=config.confidence if 0.0 < config.confidence < 1.0 else 0.9,
    )
    settings = replace(settings, window=min(settings.window, model.context_length))
    key = {
        "format": PROFILE_FORMAT,
        "model": model.model_hash,
        "text": text_hash(texts),
        "settings": settings.as_json(),
        "dtype": config.planned_dtype,
    }
    return kept(
        folder / "profiles" / f"{digest(key)}.safetensors",
        load=load_profile,
        make=lambda: _calibrated(path, config.planned_dtype, texts, settings, say),
        say=say,
        what=f"Calibrating {model.name} (once; this takes minutes)",
    )


def _made_anew_because(config: ServeConfig) -> str:
    """Why the profile that comes with the embedded model will not do; empty if it will.

    It holds at any budget, confidence and precision of weights, as one given with --profile does.
    """
    if config.text:
        return "was not made from your text"
    if config.planned_dtype != SHIPPED_DTYPE:
        return f"is for {SHIPPED_DTYPE}, not for {config.planned_dtype}"
    if config.calibration_tokens != ServeConfig.model_fields["calibration_tokens"].default:
        return f"was not made from {config.calibration_tokens} tokens"
    return ""


def _calibrated(
    path: str, dtype: str, texts: Sequence[str], settings: CalibrationSettings, say: Say
) -> Profile:
    from trimmoe.calibrate.run import calibrate
    from trimmoe.models.load import load_tokenizer

    view, settings = open_to_calibrate(path, dtype, "cpu", settings, say)
    return calibrate(view, load_tokenizer(path), texts, settings)


def _made(config: ServeConfig, profile: Profile, model: ModelSpec, settings: PlanSettings) -> Plan:
    """A plan without a search, which takes seconds."""
    assert config.cluster is not None
    cluster = _as_measured(config, load_cluster(config.cluster), model)
    return make_plan(profile, model, cluster, settings, cluster_hash=file_hash(config.cluster))


def _plan(config: ServeConfig, profile: Profile, model: ModelSpec, folder: Path, say: Say) -> Plan:
    if config.plan is not None:
        plan = load_plan(config.plan)
        if config.cluster is not None:
            _require_cluster(plan, config.cluster)
        return plan
    assert config.cluster is not None
    cluster = _as_measured(config, load_cluster(config.cluster), model)
    search, settings = wanted(config)
    cluster_hash = file_hash(config.cluster)
    return kept(
        folder / "plans" / f"{_plan_key(config, profile, model, settings, search)}.safetensors",
        load=load_plan,
        make=lambda: searched_plan(
            profile, model, cluster, search, settings, cluster_hash, survive=config.survive
        ),
        say=say,
        what=f"Planning for {cluster.name}",
    )


def wanted(config: ServeConfig) -> tuple[SearchSettings, PlanSettings]:
    """What plans are searched for: where servers guess, or where tokens are trimmed and nothing
    else saves anything; else exact execution."""
    search = SearchSettings(iterations=config.plan_iterations)
    choice = config.choice
    if choice.method == "trimming" and choice.allowed:
        search = replace(search, objective="trimmed", budget=choice.allowed)
        return search, replace(default(), stand_in_share=TRIMMED_SHARE)
    _, policy = chosen(choice)
    return replace(search, objective="guessed" if policy.guesses else "exact"), default()


def searched_plan(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSettings,
    settings: PlanSettings,
    cluster_hash: str,
    *,
    survive: int = 0,
) -> Plan:
    """`optimise_plan` with a bar, then what any `survive` servers may leave. Raises `UserError`."""
    steps = search.iterations
    if search.objective == "trimmed":
        steps += search.trimmed_iterations
    bar = track(range(steps), f"Planning for {cluster.name}")

    def step(_share: float) -> bool:
        next(bar, None)
        return True

    with closing(bar):
        found = optimise_plan(
            profile, model, cluster, search, settings, cluster_hash=cluster_hash, keep_going=step
        )
    return surviving(found, profile, model, settings, survive) if survive else found


def _inputs_hash(config: ServeConfig) -> str:
    """Of the files that say what there is to plan for."""
    assert config.cluster is not None
    return file_hash(*(path for path in (config.cluster, config.machines) if path is not None))


def _plan_key(
    config: ServeConfig,
    profile: Profile,
    model: ModelSpec,
    settings: PlanSettings,
    search: SearchSettings,
) -> str:
    return digest(
        {
            "format": PLAN_FORMAT,
            "planner": PLANNER,
            "profile": profile.hash,
            # As they are held, which is less where weights are quantised.
            "sizes": [model.dense_bytes, model.total_expert_bytes],
            "cluster": _inputs_hash(config),
            "settings": asdict(settings),
            "search": asdict(search),
            "survive": config.survive,
        }
    )


def _require_cluster(plan: Plan, path: Path) -> None:
    if plan.header.input_hashes["cluster"] != file_hash(path):
        raise UserError(
            f"The plan was made for another cluster file than {path}; run `trimmoe plan` with it, "
            "or leave out --cluster."
        )


def digest(key: dict[str, Any]) -> str:
    """A name for what follows from all that is in `key`, and from this version."""
    content = key | {"version": trimmoe.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def kept(
    path: Path,
    *,
    load: Callable[[Path], Artifact],
    make: Callable[[], Artifact],
    say: Say,
    what: str,
) -> Artifact:
    """What is kept at `path`, or made anew and kept there."""
    if path.is_file():
        try:
            return load(path)
        except UserError:
            say(f"{path} is damaged and is made again.")
    say(f"{what} ...")
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    except (OSError, UserError):
        say(f"Cannot keep it in {path.parent}; the next start will do it again.")
    return made
