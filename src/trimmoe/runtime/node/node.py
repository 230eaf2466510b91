"""One server process: messages in, batches through the worker, messages out.

The event loop owns everything but the model, the cache's contents and the engine, which belong to
the worker thread; it hands the worker one batch at a time and spreads what comes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.models.base import MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.policy.build import PolicyMaker
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.copies import able_policy
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.guides import guides_of
from trimmoe.runtime.machine_report import MachineReport
from trimmoe.runtime.node.compute.completion import withdrawn
from trimmoe.runtime.node.compute.encoding import attaching, encoder_of
from trimmoe.runtime.node.engines import make_worker, swap_engine
from trimmoe.runtime.node.front.admission import Admission
from trimmoe.runtime.node.front.front_end import FrontEnd, FrontEndContext
from trimmoe.runtime.node.front.guess_prices import GuessPrices
from trimmoe.runtime.node.front.jobs import Begun
from trimmoe.runtime.node.inbox import Inbox
from trimmoe.runtime.node.liveness import Liveness
from trimmoe.runtime.node.load_reports import LoadReports
from trimmoe.runtime.node.measuring import measured
from trimmoe.runtime.node.outbox import Outbox
from trimmoe.runtime.node.parts import Parts
from trimmoe.runtime.node.peers import Peers
from trimmoe.runtime.node.picture import picture_of
from trimmoe.runtime.node.records.checks import Geometry
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Ask,
    Evicted,
    Message,
    Parcel,
    access_of,
    first_sequence,
)
from trimmoe.runtime.node.records.output import Arrival
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.records.units import Unit
from trimmoe.runtime.node.records.verdict import rounding_of
from trimmoe.runtime.node.records.work import Step
from trimmoe.runtime.node.schedule.batch_loop import BatchLoop, LoopContext
from trimmoe.runtime.node.schedule.intake import Intake
from trimmoe.runtime.node.schedule.scheduler import Scheduler
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.node.stats import NodeSnapshot, service_stats, snapshot
from trimmoe.runtime.node.watch.deployments import Basis, Built
from trimmoe.runtime.node.watch.jury import Jury
from trimmoe.runtime.node.watch.planner import Planner
from trimmoe.runtime.node.watch.reports import Reporter
from trimmoe.runtime.picture import layout_of
from trimmoe.runtime.service import Health, InferenceService, ServedModel
from trimmoe.runtime.wire.base import Received, Transport, TransportClosed

_log = logging.getLogger(__name__)


class Node:
    """A server of the plan's cluster.

    `view` holds the dense part and this server's experts. `transport` speaks `MESSAGE_TYPES`; its
    peers are named as in the plan. Whoever made it starts it before the node and closes it after.
    A node that fails closes it itself, so that the others see it gone; `health` says so. `maker`
    makes another policy than that of the settings `policy`; `draft` guesses too, where that does.
    """

    def __init__(
        self,
        *,
        view: MoEView,
        profile: Profile,
        plan: Plan,
        policy: PolicySettings,
        transport: Transport,
        settings: NodeSettings,
        model: ServedModel,
        maker: PolicyMaker | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        self.settings, self.model = settings, model
        self._view, self._transport = view, transport
        self._drafter = None if draft is None else Drafter(draft)
        policy = able_policy(view, profile, plan, policy, settings.server)
        if isinstance(view, EncoderDecoderView):
            # Whoever guesses has caches of its own, in which no encoder's states are.
            policy = replace(policy, guesses=0)
        sharing = {"machine": settings.machine, "at_once": settings.at_once}
        self._basis = Basis.of(plan, profile, view.spec, policy, maker, **sharing)
        self.cluster = plan.cluster
        """As planned."""
        self.layout = layout_of(view.spec, plan)
        self._peers = Peers(transport, plan.cluster.server_names, settings.server)
        self._liveness = Liveness(
            self._peers,
            plan.hosts,
            left_out=lambda: self.jury.left_out,
            serves=lambda: self.health().ok,
            changed=self._lost_changed,
        )
        view.use_threads(settings.threads)
        self.batch_loop = BatchLoop(
            threads=settings.threads,
            slowdown=settings.slowdown,
            emulated=settings.batch_share is not None,
            log_batches=settings.log_events,
        )
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="trimmoe-plan")
        self._tasks: list[asyncio.Task[None]] = []
        self.outbox = Outbox(
            transport,
            self._peers.names,
            server=settings.server,
            deliver=lambda parcel: self._deliver(parcel.to, parcel),
        )
        self.jury = Jury(
            self._peers.names,
            plan.hosts,
            rounding=rounding_of(view.dtype),
            server=settings.server,
            lost=self._liveness.lost,
            leave_out=self._liveness.leave_out,
            undecided=self._undecided,
        )
        self._failure = "The server is starting."
        self.malformed: Counter[str] = Counter()

    @property
    def service(self) -> InferenceService:
        """What this server's users talk to; there once `start` has returned."""
        return self.front_end

    async def start(self) -> None:
        """Build the engine and begin to serve; servers that are not up count as lost for now."""
        settings, loop = self.settings, asyncio.get_running_loop()
        self.planner = Planner(
            self._basis,
            server=settings.server,
            pool=self._planning,
            apply=self._apply,
            feedback=lambda: self.worker.state.feedback,
            delay_s=settings.gather_news_s,
            changed_share=settings.changed_share if settings.measures else None,
        )
        self.planner.want_lost(self._liveness.lost())
        self._transport.on_peer_change(self._liveness.peer_changed)
        await self.planner.build_first()
        self.reporter = Reporter(self._transport, self._peers.names, loop.time)
        seats = Seats(
            self.worker.cache,
            settings.server,
            guides_of(self.model).guide,
            copy=self._copy_slot,
            evicted=self._evicted,
            attach=attaching(lambda: self.worker, self.batch_loop.control),
        )
        scheduler = Scheduler(
            max_rows=settings.max_batch, now=loop.time, waited=self.reporter.waited
        )
        geometry = Geometry.of(self._view, settings.server, len(self._peers.names))
        self.intake = Intake(
            geometry,
            seats,
            scheduler,
            server=settings.server,
            chunk=settings.prefill_chunk,
            chains=self._view.chains,
            ends_together=lambda: self.worker.segments.end_here,
            withdrawn=self._withdrawn,
            judge=self.jury.judge,
        )
        self.prices = GuessPrices(
            server=settings.server,
            worker=self.worker,
            planner=self.planner,
            drafter=self._drafter,
            slowdown=settings.slowdown,
            here=lambda: self.front_end.running,
            others=self.reporter.running.values,
            leads=lambda: self.front_end.leads,
        )
        self.admission = Admission(
            self.planner,
            seats,
            self.outbox.post,
            deliver=lambda sender, parcel: self.inbox.deliver(sender, parcel),
            lost=lambda sequence: self.outbox.tell_lost(sequence, ANY_POSITION),
        )
        self.front_end = FrontEnd(
            self.model,
            self._front_end_context(),
            first_sequence(settings.server, time.time_ns() >> 20),
        )
        self.inbox = Inbox(
            geometry=geometry,
            front_end=self.front_end,
            admission=self.admission,
            intake=self.intake,
            outbox=self.outbox,
            planner=self.planner,
            reporter=self.reporter,
            recent_s=settings.stall_s,
            malformed=self.malformed,
        )
        self._reports = LoadReports(
            parts=self.parts,
            peers=self._peers,
            outbox=self.outbox,
            lost=self._liveness.lost,
            device=self._view.device,
            every_s=settings.report_every_s,
        )
        self._failure = ""
        self._begin()

    def _begin(self) -> None:
        """Run the loops, once all parts are there."""
        computing = self.batch_loop.run(
            LoopContext(
                intake=self.intake,
                worker=self.worker,
                exact_hosts=lambda: self.planner.in_force.exact_hosts,
                post=self.outbox.post,
                guessed=self.front_end.speculation.guessed,
                worked=self.reporter.worked,
            )
        )
        listening = self._transport.hand_to(self._heard)
        planning, minding = self.planner.run(), self._look_after()
        loops = (computing, listening, planning, minding, self._reports.run())
        for work in loops:
            task = asyncio.create_task(work, name=f"{work.__qualname__} of {self._transport.name}")
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    async def close(self) -> None:
        """Stop; open streams raise `Unavailable`."""
        self._failure = "The server is stopping."
        tasks = list(self._tasks)
        if hasattr(self, "front_end"):
            await self.front_end.close()
            tasks += self.admission.tasks
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        # What failed was logged when it did.
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.batch_loop.close()
        self._planning.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._planning.shutdown)

    def health(self) -> Health:
        """Whether users of this server can be served."""
        return Health(ok=not self._failure, reason=self._failure)

    def snapshot(self) -> NodeSnapshot:
        """What there is to say about this server now."""
        return snapshot(self.parts)

    @property
    def parts(self) -> Parts:
        """What this server is made of, once it serves."""
        return Parts(
            server=self.settings.server,
            cluster=self.cluster,
            layout=self.layout,
            transport=self._transport,
            worker=self.worker,
            intake=self.intake,
            batch_loop=self.batch_loop,
            front_end=self.front_end,
            planner=self.planner,
            reporter=self.reporter,
            jury=self.jury,
            malformed=self.malformed,
            health=self.health,
            prices=self.prices,
        )

    async def measure(self) -> MachineReport:
        """What this server can do, timed now; requests wait for some seconds."""
        return await measured(self.parts, self._view, self.settings)

    @property
    def _remembers(self) -> bool:
        """Whether what was read is kept: what was trimmed is no matter of its tokens alone."""
        trims = self.planner.settings.readings.prompts_trimmed
        # What an encoder read is no matter of the tokens that layers read.
        reads = not isinstance(self._view, EncoderDecoderView)
        return self.settings.prefix_cache and self._view.rewinds and reads and not trims

    def _front_end_context(self) -> FrontEndContext:
        settings, worker = self.settings, self.worker
        return FrontEndContext(
            server=settings.server,
            kv_slots=settings.kv_slots,
            max_waiting=settings.max_waiting,
            patience_s=settings.patience_s,
            ask=self._ask,
            planner=self.planner,
            post=self.outbox.post,
            make_way=self.batch_loop.make_way,
            control=self.batch_loop.control,
            open_account=worker.open,
            begin_anew=worker.begin_anew,
            close_account=worker.close,
            prefix_cache=self._remembers,
            encoder=encoder_of(self._view, self.batch_loop.apart),
            retire=worker.retire,
            adopt=self._adopt,
            settle=worker.settle,
            arrive=self._arrive,
            guess=self._guess,
            prices=self.prices,
            holds=lambda route: self._view.chains and not self.worker.reads_from(route),
            is_home=worker.is_home,
            load_changed=lambda: self._reports.answers_changed(),
            chunk=settings.prefill_chunk,
            health=self.health,
            stats=lambda running, waiting: service_stats(self.parts, running, waiting),
            picture=lambda: picture_of(self.parts),
            ledger_shape={
                "layer_count": self._view.spec.layer_count,
                "server_count": len(self._peers.names),
                "hidden_bytes": self._view.spec.hidden_bytes,
            },
        )

    def _apply(self, built: Built) -> None:
        """Another engine; the first one comes with the worker."""
        basis = self._basis
        if hasattr(self, "worker"):
            self.batch_loop.control(lambda: swap_engine(self.worker, basis, built))
        else:
            self.worker = make_worker(
                self._view,
                basis,
                built,
                self.settings,
                verifying=self._peers.verifying(),
                drafter=self._drafter,
            )

    def _withdrawn(self, units: Sequence[Unit]) -> None:
        for parcel in withdrawn(units, self._view.spec.hidden_bytes):
            self.outbox.post(parcel)

    def _copy_slot(self, source: int, slot: int, length: int) -> None:
        def copy() -> None:
            self.worker.cache.copy(source, slot, length)
            self.worker.end_drafts.copy(source, slot)

        self.batch_loop.control(copy)

    def _evicted(self, sequence: int) -> None:
        # Not at once: whoever is told may be about to retain it.
        parcel = Parcel(to=access_of(sequence), message=Evicted(sequence))
        asyncio.get_running_loop().call_soon(self.outbox.post, parcel)

    def _adopt(self, sequence: int, begun: Begun, length: int) -> None:
        prefix = begun.prefix
        self.worker.draft_runner.adopt(
            sequence, prefix.sequence, begun.read, length, moves=prefix.moves
        )

    def _arrive(self, arrival: Arrival) -> None:
        self.intake.scheduler.put(Step.ARRIVE, 0, arrival)
        self.batch_loop.wake()

    def _guess(self, reading: Reading) -> None:
        # So that it shares a batch with what goes on there.
        reading.layer = self.worker.reads_from(reading.route)
        self.intake.read_on([reading])
        self.batch_loop.wake()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by an error takes the whole server out of service."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, TransportClosed) and self._failure:
            return
        _log.error("%s failed", task.get_name(), exc_info=error)
        self._failure = "This server failed; see its log and restart it."
        self._ending = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        """Tell users that nothing more will come, and other servers by falling silent."""
        await self.front_end.close()
        await self._transport.close()

    # Messages.

    def _heard(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Message)
        parcel = Parcel(to=self.settings.server, message=message, tensors=received.tensors)
        self._deliver(self._peers.index[received.peer], parcel)

    def _deliver(self, sender: int, parcel: Parcel) -> None:
        self.inbox.deliver(sender, parcel)
        self.batch_loop.wake()

    def _ask(self, sequence: int) -> None:
        for server in range(len(self._peers.names)):
            self.outbox.post(Parcel(to=server, message=Ask(sequence)))

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self.settings.stall_s)
            self.front_end.look_after()

    # Peers.

    def _lost_changed(self, server: int | None) -> None:
        """Others count as lost than before; a server may be that just now."""
        self.planner.want_lost(self._liveness.lost())
        if hasattr(self, "worker"):
            # Whole, so that the worker sees the one or the other.
            self.worker.verifier.knows = self._peers.verifying()
        if hasattr(self, "_reports"):
            if server is not None:
                self.inbox.peer_down(server)
            self._reports.send()

    def _undecided(self, unit: Unit) -> None:
        name = unit.name
        loop, tell = asyncio.get_running_loop(), self.outbox.tell_lost
        loop.call_soon(partial(tell, name.sequence, name.start, disputed=True))
