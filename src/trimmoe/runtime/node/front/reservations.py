"""Places for sequences on the servers of their routes, asked for by their access server.

While there is room for all, a prompt sets out right behind the question for its places and does not
wait for the answers, which takes a round trip. Whoever is refused one, or is told that less of the
prompt is there than was taken for granted, begins anew and asks first; so do others until somebody
has all places at once again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from trimmoe.runtime.node.front.answers import Answers
from trimmoe.runtime.node.front.jobs import Attempt, FrontEndContext, Job
from trimmoe.runtime.node.records.messages import Parcel, Reserve
from trimmoe.runtime.node.records.samplings import pack_sampling, pack_seen


@dataclass(kw_only=True, slots=True)
class Reservations:
    """Of one front end, for one request at a time."""

    context: FrontEndContext
    answers: Answers
    release: Callable[[Attempt], None]
    """Give back what an attempt has."""
    renumber: Callable[[Job, Attempt], None]
    """Give it another number."""
    blocked: bool = False
    """Whether the request whose turn it is had to queue for a place."""
    asks_first: bool = False
    """Whether requests wait for their places, since one was refused of late."""

    async def made(self, job: Job, attempt: Attempt) -> bool:
        """Ask every server of the route for a place: whether the prompt may set out. If not, one of
        them is lost or has refused it."""
        if self.asks_first or job.refused:
            return await self._granted(job, attempt)
        attempt.expected = 0 if attempt.begun is None else attempt.begun.prefix.length
        for server in attempt.servers:
            self._reserve(job, attempt, server, waits=False)
        return not attempt.trouble.done()

    async def _granted(self, job: Job, attempt: Attempt) -> bool:
        """The same once all of them are granted, however long that takes."""
        grants = [self._reserve(job, attempt, server, waits=False) for server in attempt.servers]
        if all(await asyncio.gather(*grants)):
            self.asks_first = False
            return not attempt.trouble.done()
        if attempt.trouble.done():
            return False
        self.blocked = True
        try:
            self.release(attempt)
            if attempt.begun is not None and attempt.begun.prefix.moves:
                attempt.begun = None
            self.renumber(job, attempt)
            for server in attempt.servers:
                if not await self._reserve(job, attempt, server, waits=True):
                    return False
            return not attempt.trouble.done()
        finally:
            self.blocked = False

    def _reserve(
        self, job: Job, attempt: Attempt, server: int, *, waits: bool
    ) -> asyncio.Future[bool]:
        grant: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        attempt.grants[server] = grant
        budget, _ = self.answers.quality_of(job)
        reserve = Reserve(
            sequence=attempt.sequence,
            route=list(attempt.route),
            sampling=pack_sampling(self.answers.sampling_of(job)),
            budget=budget,
            waits=waits,
            seen=pack_seen(job.request, job.tokens, wanted=self.context.prices.drafts_along),
            prefix=None if attempt.begun is None else attempt.begun.prefix,
            trimmed=self._trimmed(job, budget),
        )
        tensors = () if job.encoded is None else (job.encoded,)
        self.context.post(Parcel(to=server, message=reserve, tensors=tensors))
        return grant

    def _trimmed(self, job: Job, budget: float) -> int:
        """Tokens of what is read that may spend the budget; the answer's have done so before."""
        trims = self.context.planner.settings.readings.prompts_trimmed and budget > 0
        return len(job.request.prompt_ids) if trims else 0
