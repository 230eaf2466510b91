"""What every server of a cluster is given, and what there is of it before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.runtime.launch.config import ServeConfig, serve_config
from trimmoe.runtime.launch.model import model_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifacts:
    """What every server of a cluster is given."""

    profile: Profile
    plan: Plan
    model: ModelSpec


def servers_of(cluster: Path | None, plan: Path | None) -> tuple[str, ...]:
    """Those that a cluster file, a sample cluster or else a plan names. Raises `UserError`."""
    given = {"cluster": cluster, "plan": plan}
    return cluster_of(serve_config(None, given)).server_names


def cluster_of(config: ServeConfig) -> ClusterSpec:
    """The servers and links, without making anything. Raises `UserError`."""
    if config.cluster is not None:
        return load_cluster(config.cluster)
    assert config.plan is not None
    return load_plan(config.plan).cluster


def model_spec_of(config: ServeConfig) -> ModelSpec:
    """The model that `config` names, from the headers of its files. Raises `UserError`."""
    return _model_spec(model_folder(config.model), config.planned_dtype, config.quantise)


def _model_spec(path: str, dtype: str, quantise: Precision) -> ModelSpec:
    import torch

    from trimmoe.models.load import model_spec

    return model_spec(path, dtype=getattr(torch, dtype), hashed=True, quantise=quantise)
