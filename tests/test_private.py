"""What other accounts of the machine may not enter, read or have put there."""

from __future__ import annotations

import os
import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimmoe.core.errors import UserError
from trimmoe.core.private import (
    make_private,
    read_private,
    require_private,
    require_secret,
    write_private,
)
from trimmoe.runtime.launch import naming
from trimmoe.runtime.launch.control import Control, Question
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.member import kept
from trimmoe.runtime.launch.openings import Opening, told
from trimmoe.runtime.wire.keys import SHORTEST_TOKEN
from trimmoe.runtime.wire.sockets import SocketCarrier

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders are."""
    path = tmp_path / "run"
    monkeypatch.setenv("TRIMMOE_RUN", str(path))
    return path


@pytest.fixture
def careless() -> Iterator[None]:
    """What is made is for everybody, unless its maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("careless")
def test_what_is_made_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    make_private(tmp_path / "folder")
    make_private(tmp_path / "folder")
    for content in (b"before", b"after"):
        write_private(tmp_path / "file", content)
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == (0o700, 0o600)
    assert read_private(tmp_path / "file") == b"after"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    loose, link = tmp_path / "loose", tmp_path / "link"
    loose.mkdir()
    loose.chmod(0o710)
    with pytest.raises(UserError, match="only you can enter"):
        make_private(loose)
    loose.chmod(0o700)
    require_private(loose)
    link.symlink_to(loose)
    with pytest.raises(UserError, match="only you can enter"):
        make_private(link)


@as_root
def test_a_folder_of_another_account_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(UserError, match="only you can enter"):
        make_private(theirs)


@pytest.mark.parametrize("which", ["loose", "link", "folder"])
def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path, which: str) -> None:
    path = tmp_path / "file"
    write_private(path, b"x")
    if which == "loose":
        path.chmod(0o620)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if which == "link" else path.mkdir()
    with pytest.raises((UserError, OSError)):
        read_private(path)


class Trap:
    """What somebody who is up to no good would have unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("loose", ["root", "folder", "job"])
def test_a_job_that_others_could_have_written_is_never_unpickled(root: Path, loose: str) -> None:
    folder = RunFolder.at(8000)
    job = folder.path / "job"
    write_private(job, pickle.dumps(Trap()))
    with pytest.raises(pytest.fail.Exception, match="unpickled"):
        folder.read()
    {"root": root, "folder": folder.path, "job": job}[loose].chmod(0o777)
    for look in (lambda: RunFolder.at(8000).read(), lambda: [x.read() for x in RunFolder.all()]):
        with pytest.raises(UserError, match=r"only you can enter|yours alone"):
            look()


def test_a_run_folder_whose_sockets_have_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_RUN", str(tmp_path / ("x" * 100)))
    with pytest.raises(UserError, match="name a shorter one in TRIMMOE_RUN"):
        RunFolder.at(8000)


@as_root
def test_run_folders_of_another_account_are_not_even_looked_at(root: Path) -> None:
    """It may make the folder before the user does, and wait there for `trimmoe stop`."""
    folder = RunFolder.at(8000)
    write_private(folder.path / "job", pickle.dumps(Trap()))
    os.chown(root, NOBODY, NOBODY)
    with pytest.raises(UserError, match="only you can enter"):
        RunFolder.all()


def test_nobody_is_asked_in_a_folder_that_others_can_enter(tmp_path: Path) -> None:
    """Answers are pickles too."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UserError, match="only you can enter"):
        Control(folder / "x.sock", {})
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(folder / "x.sock"))
        theirs.listen()
        with pytest.raises(UserError, match="only you can enter"):
            Question(folder / "x.sock", "status")


async def test_links_meet_in_a_private_folder_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    carrier = SocketCarrier("a", f"unix://{tmp_path}/0.link")
    with pytest.raises(UserError, match="only you can enter"):
        await carrier.start(lambda origin, frames: None, lambda reason: None)
    tmp_path.chmod(0o700)
    await carrier.start(lambda origin, frames: None, lambda reason: None)
    await carrier.close()


@pytest.mark.usefixtures("careless")
def test_the_clusters_token_is_made_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    token = naming.own_token(said.append)
    path = tmp_path / "cache" / "cluster-token"
    assert len(token) >= SHORTEST_TOKEN
    assert mode(path) == 0o600
    assert naming.own_token(said.append) == token
    path.chmod(0o644)
    with pytest.raises(UserError, match="yours alone"):
        naming.own_token(said.append)


def test_a_kept_deployment_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """There are API keys in it."""
    assert kept(tmp_path) is None
    (tmp_path / "deployment").write_bytes(b"")
    (tmp_path / "deployment").chmod(0o644)
    with pytest.raises(UserError, match="yours alone"):
        kept(tmp_path)


@as_root
def test_a_group_may_read_what_another_account_keeps_for_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    os.chown(path, NOBODY, 0)
    path.chmod(0o640)
    require_secret(path, "cluster token")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        require_secret(path, "cluster token")


def test_what_is_opened_is_said_with_like_to_like() -> None:
    openings = [
        Opening(what="HTTP", whose="desk", at="127.0.0.1:8000", who="all", kept="TLS"),
        Opening(what="HTTP", whose="attic", at="127.0.0.1:8001", who="all", kept="TLS"),
        Opening(what="Control", whose="desk", at="/run/0.sock", who="us", kept="A folder"),
    ]
    assert told(openings) == [
        "HTTP: for all. TLS.",
        "  127.0.0.1:8000  desk",
        "  127.0.0.1:8001  attic",
        "Control: for us. A folder.",
        "  /run/0.sock     desk",
    ]
