"""A tiny model behind the in-process service and a real HTTP server, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from checkpoints import opened
from devices import DEVICE
from factories import random_cluster, random_profile
from synthetic import random_plan
from tiny import VOCABULARY, write_tiny_checkpoint
from trimmoe.api.app import create_app
from trimmoe.api.settings import ApiSettings
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.policy.presets import trimmoe
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.decoder import PlannedDecoder
from trimmoe.runtime.exact_decoder import ExactDecoder
from trimmoe.runtime.http import HttpServer
from trimmoe.runtime.local import Decoded
from trimmoe.runtime.local_service import LocalService
from trimmoe.runtime.picture import layout_of
from trimmoe.runtime.service import InferenceService, ServedModel

MODEL = "tiny"
EOS = 257
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SERVERS = 4


@dataclass(kw_only=True)
class Tiny:
    """The tiny checkpoint, opened."""

    folder: Path
    view: MoEView
    tokenizer: Any

    def model(self, *, stop_ids: frozenset[int] = frozenset({EOS})) -> ServedModel:
        return ServedModel(
            id=MODEL,
            tokenizer=self.tokenizer,
            context_length=self.view.spec.context_length,
            vocab_size=VOCABULARY,
            created=1,
            stop_ids=stop_ids,
        )

    def exact(self, *, slots: int = 4, max_waiting: int = 16) -> LocalService:
        """The model without profile and plan."""
        decoder = ExactDecoder(self.view, slots=slots)
        return LocalService(decoder, self.model(), max_waiting=max_waiting)

    def planned(
        self,
        settings: PolicySettings | None = None,
        *,
        slots: int = 4,
        max_waiting: int = 16,
    ) -> LocalService:
        """The model under a random profile and plan."""
        rng = np.random.default_rng(1)
        profile = random_profile(rng, self.view.spec)
        cluster = random_cluster(rng, servers=SERVERS)
        plan = random_plan(rng, self.view.spec, cluster)
        engine = make_engine(plan, profile, self.view.spec, settings or trimmoe())
        decoder = PlannedDecoder(
            self.view,
            profile,
            engine,
            slots=slots,
            server_names=cluster.server_names,
            layout=layout_of(self.view.spec, plan),
        )
        return LocalService(decoder, self.model(), max_waiting=max_waiting)

    def greedy(
        self, prompt: list[int], new: int, *, eos: int | None = EOS, **options: Any
    ) -> list[int]:
        """What transformers itself generates, with any `options` of its `generate`."""
        ids = torch.tensor([prompt])
        made = opened(self.folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            eos_token_id=eos, pad_token_id=258, **options,
        )  # fmt: skip
        return made[0, len(prompt) :].tolist()


def open_tiny(folder: Path) -> Tiny:
    """Write and open the tiny checkpoint, with a chat template."""
    write_tiny_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    return Tiny(folder=folder, view=open_model(folder, device=DEVICE), tokenizer=tokenizer)


class SteppedDecoder(ExactDecoder):
    """Decodes a step only when told to, so that an answer is as far as a test wants it to be."""

    def __init__(self, view: MoEView, *, slots: int) -> None:
        super().__init__(view, slots=slots)
        self.allowed = threading.Semaphore(0)

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        assert self.allowed.acquire(timeout=60), "the test did not allow another step"
        return super().decode(tokens)


@contextmanager
def served(
    service: InferenceService, settings: ApiSettings | None = None, *, grace_s: int = 5
) -> Iterator[str]:
    """The service's app on a free port of a real server; gives its base URL.

    Requests that are open at the end of the block get `grace_s` to come to theirs.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(service, settings), log_level="warning", timeout_graceful_shutdown=grace_s
    )
    server = HttpServer(config, service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def eventually(true: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for a condition that another thread brings about; fails if it never does."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "what was waited for never happened"
        time.sleep(0.005)
