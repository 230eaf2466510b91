"""HTTPS: what cannot be served with is refused at once, and what is served is encrypted."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from fastapi import FastAPI

from launching import write_files
from test_gateway import listening
from trimmoe.api.gateway.app import GatewaySettings, create_gateway
from trimmoe.api.settings import ApiSettings
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.private import write_private
from trimmoe.core.profile import load_profile
from trimmoe.experiments import serve_local
from trimmoe.experiments.serve_cluster import pieces_of
from trimmoe.models.load import model_spec
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig, serve_config
from trimmoe.runtime.launch.deployment import deployment_of, settings_of
from trimmoe.runtime.launch.local import local_endpoints
from trimmoe.runtime.launch.machine import Machine
from trimmoe.runtime.launch.tls import Tls, tls_of, trusted
from trimmoe.runtime.wire.keys import generate_token


@dataclass(frozen=True)
class Pem:
    """A certificate for this machine and who signed it, on disk."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def tls(self) -> Tls:
        made = tls_of(self.certificate, self.key)
        assert made is not None
        return made


def pem(folder: Path) -> Pem:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    paths = Pem(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(paths.authority)
    write_private(paths.key, made.private_key_pem.bytes())
    for part in made.cert_chain_pems:
        part.write_to_path(paths.certificate, append=True)
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Pem:
    return pem(tmp_path_factory.mktemp("pem"))


def test_both_options_or_none() -> None:
    assert tls_of(None, None) is None
    for given in ({"tls_certificate": "a.pem"}, {"tls_key": "a.key"}):
        with pytest.raises(UserError, match="--tls-certificate and --tls-key"):
            serve_config(None, {"cluster": "local4", **given})
        with pytest.raises(UserError, match="--tls-certificate and --tls-key"):
            tls_of(
                *(Path(name) if name in given else None for name in ("tls_certificate", "tls_key"))
            )


def test_what_cannot_be_served_with_is_one_sentence(files: Pem, tmp_path: Path) -> None:
    other = pem(tmp_path)
    with pytest.raises(UserError, match="cannot be served with"):
        tls_of(files.certificate, other.key)
    with pytest.raises(UserError, match="cannot be served with"):
        tls_of(files.key, other.key)
    with pytest.raises(UserError, match="Cannot read the TLS key"):
        tls_of(files.certificate, tmp_path / "none")
    with pytest.raises(UserError, match="holds no certificates"):
        trusted(files.key)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    files = pem(tmp_path)
    files.key.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        tls_of(files.certificate, files.key)


def test_a_key_under_a_password_is_refused_and_nobody_is_asked(files: Pem, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key(files.key.read_bytes(), None)
    locked = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret")
    )
    write_private(tmp_path / "key", locked)
    with pytest.raises(UserError, match="without a password"):
        tls_of(files.certificate, tmp_path / "key")


def test_the_head_tells_members_that_there_is_tls_but_not_where_its_files_are(files: Pem) -> None:
    given = {"tls_certificate": files.certificate, "tls_key": files.key, "cluster": "local4"}
    config = serve_config(None, given)
    told = ServeConfig.model_validate_json(settings_of(config))
    assert (told.tls, told.tls_certificate, told.tls_key) == (True, None, None)
    assert {each.url[:8] for each in local_endpoints(config, ("a", "b"))} == {"https://"}


def test_machines_of_a_cluster_serve_https_all_or_none(files: Pem, tmp_path: Path) -> None:
    made = write_files(tmp_path, ("desk", "attic"))
    artifacts = Artifacts(
        profile=load_profile(made.profile),
        plan=load_plan(made.plan),
        model=model_spec(made.model, hashed=True),
    )
    machines = {"desk": "10.0.0.1", "attic": "10.0.0.2"}
    for at_head, here in ((True, None), (False, files.tls)):
        config = ServeConfig(model=str(made.model), policy="exact", tls=at_head)
        deployment = deployment_of(config, artifacts, machines)
        said: list[str] = []
        machine = Machine(("attic",), generate_token(), tmp_path, said.append, pieces_of, here)
        machine.want({"one": deployment}, {"one"})
        assert "on all machines or on none" in said[0]
        assert machine.reports()[0].error == said[0]


@pytest.mark.parametrize("which", ["gateway", "serve-local"])
def test_the_options_reach_the_http_server(
    files: Pem, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[uvicorn.Config] = []

    def run(server: uvicorn.Server, sockets: Any = None) -> None:
        configs.append(server.config)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve: dict[str, Callable[[], None]] = {
        "gateway": lambda: serve_local.run_gateway(
            GatewaySettings(servers=("http://127.0.0.1:1",)), "127.0.0.1", 0, files.tls
        ),
        "serve-local": lambda: serve_local.serve(_Service(), ApiSettings(), _no_socket, files.tls),  # type: ignore[arg-type]
    }
    monkeypatch.setattr(serve_local, "create_app", lambda *_: FastAPI())
    serve[which]()
    (config,) = configs
    assert (config.ssl_certfile, config.ssl_keyfile) == (files.tls.certificate, files.tls.key)


class _Service:
    """Never asked."""


_no_socket = object()


def test_a_gateway_and_a_server_behind_tls_know_one_another(files: Pem) -> None:
    """What is said in plain text is not understood, and who is not trusted is not asked."""
    server = FastAPI()
    server.add_api_route("/health", lambda: {"status": "ok"})
    server.add_api_route("/v1/models", lambda: {"data": []})
    shown = ssl.create_default_context(cafile=str(files.authority))
    with listening(server, files.tls) as behind:
        assert behind.startswith("https://")
        for trust, status in ((trusted(files.authority), 200), (trusted(None), 503)):
            settings = GatewaySettings(servers=(behind,), silence_s=2.0, trusted=trust)
            with listening(create_gateway(settings), files.tls) as front:
                assert httpx.get(f"{front}/v1/models", verify=shown).status_code == status
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    httpx.get(f"{front}/v1/models")
                with pytest.raises(httpx.RemoteProtocolError):
                    httpx.get(f"{front}/v1/models".replace("https", "http"))
