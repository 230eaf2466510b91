"""A head and a machine that joins it, both on this one, for tests of them."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest

from launching import PATIENCE_S, Serving, free_ports, listening, write_files
from trimmoe.core.private import write_private
from trimmoe.experiments.serve_cluster import openings_of_head
from trimmoe.models.exact import greedy
from trimmoe.models.load import open_model
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.naming import own_address
from trimmoe.runtime.launch.several import HeadOptions
from trimmoe.runtime.wire.keys import generate_token

NAMES = ("desk", "attic")


class Stream:
    """An answer that is read from when this is made."""

    def __init__(self, port: int, prompt: list[int], length: int) -> None:
        self._ids: list[int] = []
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0,
            "stream": True, "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        self._request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def tokens(self) -> list[int]:
        self._thread.join()
        return self._ids

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=PATIENCE_S) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self._ids += choice.get("token_ids") or []


class Cluster:
    """Two machines on one; the first is the head."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
        self._folder, self._files = folder, write_files(folder, NAMES)
        self.port, address = free_ports(330), own_address()
        self.at = f"{address}:{self.port + 220}"
        for name in ("token", "wrong-token"):
            write_private(folder / name, generate_token().encode())

    def head(self) -> Serving:
        files, (address, port) = self._files, self.at.split(":")
        return self._serving(
            *("--head", "--server", "desk", "--address", address, "--head-port", port),
            *("--host", "127.0.0.1", "--cluster", str(files.cluster), "--model", str(files.model)),
            *("--policy", "exact", "--profile", str(files.profile), "--plan", str(files.plan)),
            *("--port-base", str(self.port), "--no-spare"),
        )

    def opens_what_check_says(self, head: Serving) -> None:
        """All of it but what is for moving to another plan, and nothing else."""
        address, port = self.at.split(":")
        config = ServeConfig(
            cluster=self._files.cluster, port_base=self.port, host="127.0.0.1", spare=False
        )
        options = HeadOptions(address=address, port=int(port), servers=("desk",), token=None)
        said = {each.at for each in openings_of_head(config, options)}
        below = [each.pid for each in family.descendants(head.process.pid)]
        turns = (f":{self.port + 150}", f"/{self.port}-1/")
        later = {at for at in said if any(turn in at for turn in turns)}
        assert len(later) == 3
        assert listening(head.process.pid, *below) == said - later

    def open_head(self) -> Serving:
        files, (address, port) = self._files, self.at.split(":")
        return self._serving(
            *("--head", "--server", "desk", "--address", address, "--head-port", port),
            *("--host", "127.0.0.1", "--servers", "1", "--model", str(files.model)),
            *("--policy", "exact", "--profile", str(files.profile)),
            *("--port-base", str(self.port), "--no-spare"),
        )

    def joined(self, token: str = "token", server: str = "attic") -> Serving:
        return self._serving("--join", self.at, "--server", server, token=token)

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        """What transformers' model says."""
        return greedy(open_model(str(self._files.model)), [prompt], length)[0]

    def _serving(self, *options: str, token: str = "token") -> Serving:
        known = ("--token-file", str(self._folder / token))
        command = [str(Path(__file__).with_name("serve_soon.py")), "serve", *known, *options]
        return Serving(command, cache=self._folder / "cache")

    def pid(self, index: int) -> int:
        pid = RunFolder.at(self.port + index).pid(index)
        assert pid is not None
        return pid
