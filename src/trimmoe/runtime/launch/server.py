"""One edge server from its description: model, links, node and HTTP in one event loop.

Knows nothing of processes: `run_server` is a coroutine that serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import uvicorn

import trimmoe
from trimmoe.core.cores import available_cores
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import resolve
from trimmoe.models.draft import DraftModel, Served, open_draft
from trimmoe.models.draft_head_file import open_draft_head
from trimmoe.models.load import known_device, load_tokenizer, open_model
from trimmoe.models.memory import give_back
from trimmoe.models.passed import BytesRead
from trimmoe.policy.build import PolicyMaker
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.http import HttpServer
from trimmoe.runtime.launch.addresses import KEEP_ALIVE_S, Endpoint, listener
from trimmoe.runtime.launch.model import model_folder
from trimmoe.runtime.launch.tls import Tls
from trimmoe.runtime.machine_report import MachineReport
from trimmoe.runtime.service import InferenceService, ServedModel
from trimmoe.runtime.wire.base import Carrier
from trimmoe.runtime.wire.codec import MessageTypes
from trimmoe.runtime.wire.emulation import EmulatedCarrier, links_of
from trimmoe.runtime.wire.keys import keyring_from_token
from trimmoe.runtime.wire.sockets import SocketCarrier
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import ZmqCarrier

TOKEN_VARIABLE = "TRIMMOE_TOKEN"
"""Environment variable that holds the cluster token on every machine; it is never sent."""
_GRACE_S = 3
"""What streams get to end by themselves when the server stops, in whole seconds."""
_MEETING_S = 15.0
"""How long no further server turns up until the missing ones are taken for lost."""
_LOOK_S = 0.05


class RunningNode(Protocol):
    """What `launch` needs of a node."""

    @property
    def service(self) -> InferenceService: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def measure(self) -> MachineReport: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """What a node is made of."""

    spec: ServerSpec
    view: MoEView
    transport: LinkTransport
    model: ServedModel
    draft: DraftModel | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFactory:
    """How a server makes its node; both parts are importable names, so that they can be sent."""

    make: Callable[[NodeParts], RunningNode]
    message_types: Callable[[], MessageTypes]
    """What its transport may receive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """One server of a cluster, complete: what it takes to start it again."""

    index: int
    """Its row in the plan's cluster."""
    endpoints: tuple[Endpoint, ...]
    """Of all servers, in the plan's order."""
    model: str
    """As in `ServeConfig`; found on the server's own machine."""
    served_name: str
    device: str | None
    """`auto` is the best one that its machine has; None: what the cluster says of the server."""
    dtype: str
    """`auto` follows the device."""
    profile: Profile
    plan: Plan
    policy: PolicySettings
    maker: PolicyMaker | None
    """Of a policy that is not that of `policy`."""
    title: str
    """Of what decides, for the operator."""
    kv_slots: int
    max_waiting: int
    patience_s: float
    quantise: Precision
    threads: int | None
    emulate_links: bool
    emulate_machines: bool
    encrypt: bool
    app: Callable[[InferenceService], Any]
    """Makes the ASGI app that starts and closes the service with itself."""
    node: NodeFactory
    prefix_cache: bool = True
    verify_share: float = 0.0
    draft_head: str = "auto"
    """What guesses on from the model's states; see `open_draft_head`."""
    draft_model: str | None = None
    """What guesses too; found on the server's own machine."""
    tls: Tls | None = None
    """What HTTP is served with; None: plain."""
    version: str = trimmoe.__version__

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[self.index]

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def thread_count(self) -> int:
        """How many threads this server computes with: unless that is said, its share of the
        machine that it runs on."""
        if self.threads is not None:
            return self.threads
        neighbours = sum(each.machine == self.endpoint.machine for each in self.endpoints)
        return max(1, available_cores() // neighbours)

    @property
    def machine(self) -> tuple[int, ...]:
        """Number of the machine of each server."""
        order = list(dict.fromkeys(each.machine for each in self.endpoints))
        return tuple(order.index(each.machine) for each in self.endpoints)

    @property
    def at_once(self) -> float:
        """Servers of a machine that may compute at once, if all machines are like this one."""
        return max(1.0, available_cores() / self.thread_count)

    @property
    def slowdown(self) -> float:
        """How many times slower than the fastest server this one is made to be."""
        return float(self.plan.cluster.slowdown[self.index]) if self.emulate_machines else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What a server says once it listens."""

    service: InferenceService
    transport: LinkTransport
    bytes_read: BytesRead
    measure: Callable[[], Coroutine[Any, Any, MachineReport]]
    """Times the server."""


class Orders:
    """What a running server is told, and how far it is with it; used in its event loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """End."""
        self.drain = asyncio.Event()
        """Take no more requests of users, and go on with all else."""
        self.drained = False
        """Whether all users that there were have their answers."""


async def run_server(spec: ServerSpec, orders: Orders, started: Callable[[Started], None]) -> None:
    """Serve until told to stop; `started` is called once both ports answer.

    Raises `UserError` for what the operator can mend, before `started`.
    """
    if spec.version != trimmoe.__version__:
        raise UserError(
            f"TrimMoE {spec.version} was to run here and was replaced by {trimmoe.__version__}; "
            "start `trimmoe serve` again."
        )
    path = model_folder(spec.model)
    view = open_own_part(spec, path)
    transport = LinkTransport(_carrier(spec), spec.node.message_types())
    async with transport:
        for peer in spec.endpoints:
            if peer.name != spec.name:
                transport.connect(peer.name, peer.wire_address)
        model = _served_model(spec, view, path)
        parts = NodeParts(
            spec=spec,
            view=view,
            transport=transport,
            model=model,
            draft=_draft(spec, view, model.tokenizer),
        )
        await _met(transport, spec, orders.stop)
        node = spec.node.make(parts)
        try:
            await node.start()
            news = Started(
                service=node.service,
                transport=transport,
                bytes_read=view.bytes_read,
                measure=node.measure,
            )
            await _serve_http(spec, node.service, orders, lambda: started(news))
        finally:
            await node.close()


async def _met(transport: LinkTransport, spec: ServerSpec, stop: asyncio.Event) -> None:
    """Wait for the other servers as long as more of them turn up.

    A node takes those that are missing for lost, and plans without them: not wrong, but wasted
    where they are about to come.
    """
    others = len(spec.endpoints) - 1
    loop = asyncio.get_running_loop()
    seen, since_s = 0, loop.time()
    while seen < others and loop.time() - since_s < _MEETING_S and not stop.is_set():
        await asyncio.sleep(_LOOK_S)
        if len(transport.peers_up()) > seen:
            seen, since_s = len(transport.peers_up()), loop.time()


def open_own_part(spec: ServerSpec, path: str) -> MoEView:
    """The dense part and the experts that the plan gives this server, nothing else.

    Raises `UserError` if the checkpoint on this machine is not the calibrated one.
    """
    hosts = spec.plan.hosts[spec.index]
    device = known_device(spec.device or spec.plan.cluster.device(spec.index))
    experts = {layer: held.nonzero()[0].tolist() for layer, held in enumerate(hosts)}
    view = open_model(
        path,
        experts=experts,
        dtype=_dtype(spec.dtype, device),
        device=device,
        quantise=spec.quantise,
        hashed=True,
        stand_ins=_copies(spec),
        input_squares=spec.profile.input_squares,
        threads=spec.thread_count,
    )
    spec.profile.require_model(view.spec)
    # Also where nothing is guessed: a probe times it.
    open_draft_head(view, resolve(path), spec.draft_head)
    give_back()
    return view


def _draft(spec: ServerSpec, view: MoEView, tokenizer: Any) -> DraftModel | None:
    """The draft model, if there is one. Raises `UserError`."""
    if spec.draft_model is None:
        return None
    served = Served(
        tokenizer=tokenizer,
        vocab_size=view.spec.vocab_size,
        dtype=view.dtype,
        device=view.device,
    )
    return open_draft(model_folder(spec.draft_model), served, slots=spec.kv_slots)


def _copies(spec: ServerSpec) -> IntArray | None:
    """Bits of the copies of other servers' experts that this one guesses with, or has run in their
    place, [N, E]."""
    bits, policy = spec.plan.stand_in_bits, spec.policy
    wanted = policy.guesses or (policy.levers.stand_in and spec.profile.rungs)
    return None if bits is None or not wanted else bits[spec.index]


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, wanted)


def _carrier(spec: ServerSpec) -> Carrier:
    endpoint = spec.endpoint
    keyring = None
    if spec.encrypt:
        names = (each.name for each in spec.endpoints)
        keyring = keyring_from_token(_token(), spec.name, names)
    carrier: Carrier
    if endpoint.link:
        carrier = SocketCarrier(endpoint.name, endpoint.wire_address)
    else:
        carrier = ZmqCarrier(endpoint.name, endpoint.wire_address, keyring=keyring)
    if not spec.emulate_links:
        return carrier
    return EmulatedCarrier(carrier, links_of(spec.plan.cluster, spec.name))


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UserError(
            f"This machine has no cluster token; set {TOKEN_VARIABLE} to the head's before joining."
        )
    return token


def _served_model(spec: ServerSpec, view: MoEView, path: str) -> ServedModel:
    tokenizer = load_tokenizer(path)
    stop = tokenizer.eos_token_id
    return ServedModel(
        id=spec.served_name,
        tokenizer=tokenizer,
        context_length=view.spec.context_length,
        vocab_size=view.spec.vocab_size,
        created=round(time.time()),
        stop_ids=frozenset(() if stop is None else (stop,)),
    )


async def _serve_http(
    spec: ServerSpec, service: InferenceService, orders: Orders, ready: Callable[[], None]
) -> None:
    """The app on its port until told to drain or stop; the app's lifespan starts and closes the
    service. Returns when told to stop."""
    endpoint = spec.endpoint
    try:
        # Shared with the servers of another plan that take this one's place, and with nobody else:
        # the run folder sees to that.
        listening = listener(endpoint.http_host, endpoint.http_port, shared=True)
    except OSError as error:
        raise UserError(
            f"{endpoint.name} cannot listen on {endpoint.http_host}, port {endpoint.http_port} "
            f"({error.strerror}); free the port or choose another --port-base."
        ) from error
    config = uvicorn.Config(
        spec.app(service),
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        **(spec.tls.for_uvicorn() if spec.tls else {}),
    )
    server = HttpServer(config, service)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    told = [asyncio.create_task(each.wait()) for each in (orders.stop, orders.drain)]
    try:
        while not (server.started or serving.done() or any(each.done() for each in told)):
            await asyncio.sleep(_LOOK_S)
        if server.started:
            ready()
        await asyncio.wait((serving, *told), return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not any(each.done() for each in told):
            raise RuntimeError("the HTTP server ended by itself; see the log")
        if not orders.stop.is_set():
            config.timeout_graceful_shutdown = None
            server.should_exit = server.drains = True
            await asyncio.wait((serving, told[0]), return_when=asyncio.FIRST_COMPLETED)
            orders.drained = serving.done()
            await orders.stop.wait()
        # Whoever is still being answered after draining has had all the time there is.
        server.should_exit, server.force_exit = True, orders.drain.is_set()
        await serving
    finally:
        for each in told:
            each.cancel()
        listening.close()
