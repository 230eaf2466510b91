"""What the operator may say, and where servers listen."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from trimmoe.core.errors import UserError
from trimmoe.cost.model import Accounting
from trimmoe.experiments.serve_cluster import POLICIES, pieces_of
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.launch.addresses import (
    Endpoint,
    endpoints,
    is_loopback,
    listener,
    require_free,
)
from trimmoe.runtime.launch.config import ServeConfig, serve_config
from trimmoe.runtime.launch.join import serve_join
from trimmoe.runtime.launch.naming import cluster_token

GIVEN = {"cluster": "c.yaml"}


def test_defaults_serve_the_embedded_model_on_this_machine() -> None:
    config = serve_config(None, GIVEN)
    assert config.model == "embedded"
    assert config.host is None
    assert (config.port_base, config.first_wire_port) == (8000, 8100)


def test_options_win_over_the_file_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("cluster: mine.yaml\nport-base: 9000\nkv_slots: 3\ntext: [a.txt]\n")
    config = serve_config(path, {"kv_slots": 5, "model": None})
    assert config.cluster == tmp_path / "mine.yaml"
    assert config.text == (tmp_path / "a.txt",)
    assert (config.port_base, config.kv_slots) == (9000, 5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"port_base": 0}, "port-base"),
        ({"port_base": 70_000}, "port-base"),
        ({"budget": 1.5}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"kv_slots": 0}, "kv-slots"),
        ({"api_keys": [""]}, "api-keys"),
        ({"servers": 3}, "servers"),
    ],
)
def test_a_wrong_setting_is_named(given: dict, named: str) -> None:
    with pytest.raises(UserError, match=f"`{named}"):
        serve_config(None, GIVEN | given)


@pytest.mark.parametrize("other", [{"plan": "p.safetensors"}, {"method": "exact"}])
def test_what_a_plan_survives_is_said_where_it_is_made(other: dict) -> None:
    assert serve_config(None, GIVEN | {"survive": 1}).survive == 1
    with pytest.raises(UserError, match="leave out --plan and --method"):
        serve_config(None, GIVEN | {"survive": 1} | other)


def test_api_keys_in_a_file_that_others_can_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("api-keys: [secret]\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match=f"API keys in {path}; run `chmod 600"):
        serve_config(path, GIVEN)
    path.chmod(0o600)
    assert serve_config(path, GIVEN).api_keys == ("secret",)


@pytest.mark.parametrize("content", ["- 1\n", "a: [\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"serve\.yaml"):
        serve_config(path, GIVEN)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        serve_config(tmp_path / "none.yaml", GIVEN)


def test_without_cluster_and_plan_there_are_no_servers() -> None:
    with pytest.raises(UserError, match="--cluster or --plan"):
        serve_config(None, {})


def test_policies_are_presets_whose_tokens_keep_their_cache() -> None:
    moving = {name for name, made in PRESETS.items() if made().accounting is Accounting.MIGRATE}
    assert moving == set(PRESETS) - set(POLICIES) != set()
    with pytest.raises(UserError, match="no policy `paper`"):
        pieces_of(ServeConfig(policy="paper"))


def test_nothing_is_trimmed_unless_a_budget_or_a_policy_says_so() -> None:
    default = pieces_of(ServeConfig()).policy
    assert (default.name, default.budget, default.guesses > 0) == ("auto", 0.0, True)
    assert (default.in_need, default.spends) == (None, False)
    spends = pieces_of(ServeConfig(budget=0.0)).policy
    assert (spends.name, spends.relaxed, spends.guesses > 0) == ("auto", True, True)
    assert spends.levers.lossless
    trims = spends.for_hosts(np.zeros((2, 3, 4), dtype=bool))
    assert (trims.name, trims.levers.skip, trims.guesses > 0) == ("auto", True, True)
    by_name = pieces_of(ServeConfig(policy="trimmoe")).policy
    assert (by_name.name, by_name.budget) == ("trimmoe", 0.02)


def test_budget_and_confidence_reach_the_policy() -> None:
    policy = pieces_of(ServeConfig(budget=0.01, confidence=0.7)).policy
    assert (policy.budget, policy.confidence) == (0.01, 0.7)
    assert pieces_of(ServeConfig(policy="exact", budget=0.5)).policy.budget == 0.0


def test_servers_of_one_machine_take_ports_in_a_row() -> None:
    made = endpoints(
        ("a", "b", "c"),
        {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.1"},
        http_host=None,
        port_base=8000,
        wire_port_base=8100,
    )
    assert [(each.machine, each.http_port, each.wire_port) for each in made] == [
        ("10.0.0.1", 8000, 8100),
        ("10.0.0.2", 8000, 8100),
        ("10.0.0.1", 8001, 8101),
    ]
    assert made[0].url == "http://10.0.0.1:8000/v1"
    assert made[1].wire_address == "tcp://10.0.0.2:8100"


@pytest.mark.parametrize(("port", "wire"), [(65_534, 8100), (8000, 65_535), (8000, 8002)])
def test_ports_that_run_out_or_meet_are_refused(port: int, wire: int) -> None:
    names = ("a", "b", "c")
    with pytest.raises(UserError, match="ports"):
        endpoints(
            names,
            dict.fromkeys(names, "127.0.0.1"),
            http_host=None,
            port_base=port,
            wire_port_base=wire,
        )


def test_listening_everywhere_is_reached_at_the_machine() -> None:
    one = Endpoint(
        name="a", machine="10.0.0.1", http_host="0.0.0.0", http_port=8000, wire_port=8100
    )
    assert one.url == "http://10.0.0.1:8000/v1"


@pytest.mark.parametrize("which", ["http", "wire"])
def test_a_port_in_use_is_one_sentence(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, listener("127.0.0.1", 0) as other:
        used, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        wanted = Endpoint(
            name="attic",
            machine="127.0.0.1",
            http_host="127.0.0.1",
            http_port=used if which == "http" else free,
            wire_port=used if which == "wire" else free,
        )
        with pytest.raises(UserError, match=f"port {used} on 127.0.0.1, meant for server attic"):
            require_free([wanted])


def test_free_ports_stay_free_after_the_check() -> None:
    with listener("127.0.0.1", 0) as first, listener("127.0.0.1", 0) as second:
        http, wire = first.getsockname()[1], second.getsockname()[1]
    one = Endpoint(
        name="a", machine="127.0.0.1", http_host="127.0.0.1", http_port=http, wire_port=wire
    )
    require_free([one])
    for port in (http, wire):
        listener("127.0.0.1", port).close()


def test_loopback_is_told_from_what_others_reach() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("attic.lan")


def test_the_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
    assert cluster_token(None) is None
    monkeypatch.setenv("TRIMMOE_TOKEN", "e" * 43)
    assert cluster_token(None) == "e" * 43
    path = tmp_path / "token"
    path.write_text("f" * 43 + "\n")
    path.chmod(0o600)
    assert cluster_token(path) == "f" * 43
    path.chmod(0o640)
    with pytest.raises(UserError, match=f"chmod 600 {path}"):
        cluster_token(path)


def test_a_short_or_unreadable_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UserError, match="Cannot read"):
        cluster_token(path)
    path.write_text("hunter2")
    path.chmod(0o600)
    with pytest.raises(UserError, match="7 characters"):
        cluster_token(path)


def test_joining_needs_a_token() -> None:
    with pytest.raises(UserError, match="TRIMMOE_TOKEN"):
        serve_join("head", servers=("attic",), token=None, say=print, assemble=pieces_of)
