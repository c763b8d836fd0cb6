"""Prompts that have run: each goes to the pool, or is offered to a decode worker where no pool is of use.

    through ─┬─ waits for pages ── pages at hand ──▶ copied ──▶ Commit
             └─ Offer ──▶ departing (worker/offering.py) ──▶ gone
                             └── Decline, or the decode worker is lost ──▶ as if never offered

A prompt is written to pages of the pool and committed; the Commit names the decode worker, since the pool pins
requests that cannot wait. No pool is of use to a node without decode workers, nor where the policy has KV stay on its
device until a decode worker pulls it (DistServe §4.3): there all prompts are offered, and wait on this device until a
decode worker has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from alignedserve.core import ServiceClass, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import CopiedOut, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import Commit, LeasePages, Member
from alignedserve.scheduling.policy import Handoff
from alignedserve.worker.arriving import ANSWER_S, PromptQueue
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.offering import Departure, Departures, Offering
from alignedserve.worker.owners import Owners
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import Copy, Need, PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class Peers:
    """The decode workers that KV can be sent to directly."""

    def __init__(self, departures: Departures) -> None:
        self._departures = departures
        self._all: dict[str, Member] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def meet(self, peer: Member) -> None:
        self._all[peer.name] = peer

    def lose(self, peer: Member) -> None:
        self._all.pop(peer.name, None)

    def get(self, name: str) -> Member | None:
        return self._all.get(name)

    def has_one_on(self, node: str) -> bool:
        return any(peer.node == node for peer in self._all.values())

    def any(self, before: str = "") -> Member | None:
        """Return the decode worker to which least is offered, if any; `before` only where there is no other."""
        offered = Counter(departure.to.name for departure in self._departures.wanted)
        peers = self._all.values()
        return min(peers, key=lambda peer: (peer.name == before, offered[peer.name], peer.name), default=None)


class PromptRequests(Requests):
    """The requests on a prefill worker, with what belongs to some states."""

    queue: PromptQueue  # prompts that wait for a seat

    def __init__(self) -> None:
        super().__init__()
        self.departures = Departures()
        self.peers = Peers(self.departures)


class Commits(CorePart):
    """Prompts that go to the pool: they wait for pages, are copied, and are committed.

    A real-time prompt runs at once, and asks for its pages when it is through. A best-effort one is seated when the
    pages for all its KV are leased (running.py). Pages that no prompt waits for go back to the pool: another worker may
    wait for them.
    """

    def __init__(
        self, here: PromptRequests, memory: DeviceMemory, pool: PoolLink, log: WorkerLog, owners: Owners
    ) -> None:
        self._here, self._pool, self._memory, self._writer = here, pool, memory, pool.writer
        self._names, self._reuse, self._outputs = pool.writer.names, memory.pace.policy.reuse, owners.outputs
        self._queue, self._holds, self._decisions = here.queue, pool.holds, log.decisions
        self._asked_for: dict[WorkerRequest, None] = {}  # real-time prompts that run, and for which pages were asked
        self._answered_by = 0.0  # until then the next step waits for pages for a chat that is through

    @property
    def waiting(self) -> Collection[WorkerRequest]:
        """Return the prompts that are through and wait for pages."""
        return self._here.among(State.THROUGH)

    @property
    def target(self) -> Member | None:
        """Return the pool that may be written to now."""
        return self._writer.target(self._pool.member)

    def add(self, running: WorkerRequest) -> None:
        """Let a prompt that is through wait for pages."""
        self._decisions.note(Kind.WRITES, running.request, tokens=running.prefix, number=len(self.waiting))
        self._here.move(running, State.THROUGH)

    def first(self, service: ServiceClass) -> WorkerRequest | None:
        """Return the prompt of this class that has waited longest for pages."""
        return next((running for running in self.waiting if running.request.service is service), None)

    def _unwritten(self, running: WorkerRequest) -> int:
        """Return how many pages are to be written of a prompt that is through."""
        return self._writer.pages_for(running, running.prefix)

    def pages_for(self, running: WorkerRequest) -> int:
        """Return how many pages are to be written once all tokens of a prompt have KV."""
        limits = self._memory.limits
        if unread := limits.unread(running.num_tokens):
            return units_for(running.num_tokens - unread, limits.page_size)
        return self._writer.pages_for(running, running.num_tokens)

    def names_of(self, running: WorkerRequest) -> tuple[int, ...]:
        """Return the names of the full pages of a prompt that is through; none where prompts are not reused."""
        return self._names.pages_of(running, running.prefix) if self._reuse else ()

    # --- Pages

    def leased(self, lease: LeasePages, frame: Received, now: float) -> None:
        if self._writer.take_answer(lease):
            self._memory.reconsider()

    @property
    def is_writing_for_chat(self) -> bool:
        """Return whether a part of a chat that is through is still being written: the rest can be written after it."""
        first = self.first(ServiceClass.RT)
        return first is not None and self._writer.is_writing(first)

    @property
    def answered_by(self) -> float:
        """Return until when the next step is to wait for pages for a chat that is through; 0 where none lacks any."""
        is_asked = self.first(ServiceClass.RT) is not None and self._writer.is_awaited(ServiceClass.RT)
        return self._answered_by if is_asked else 0.0

    def ask_for_chats(self, now: float) -> list[Command]:
        """Ask for pages for real-time prompts that run now, where others are to run after them.

        If they were asked for when the prompts are through, their KV would wait until another step has ended.
        """
        prompts = self._here.prompts.values()
        new = [running for running in prompts if running.promise.is_rt and running not in self._asked_for]
        pool = self.target
        if not new or pool is None or self.first(ServiceClass.RT) is not None:
            return []
        is_last = not self._queue.waiting and len(new) == len(prompts)
        if is_last and all(running.prefix <= running.num_cached for running in new):
            return []
        wanted = sum(self.pages_for(running) for running in (*self._asked_for, *new))
        asks = self._writer.ask_if_any(pool, ServiceClass.RT, wanted)
        if asks or self._writer.num_at_hand(ServiceClass.RT) >= wanted:
            self._asked_for.update(dict.fromkeys(new))
        return asks

    def _need(self, service: ServiceClass) -> Need:
        """Return what the first prompt of this class that is through needs: all prompts together may need more pages
        than there will ever be.

        Where none is through, return what the best-effort prompt that has waited longest for a seat needs. Nothing is
        kept for it while a real-time prompt that is through waits for pages: its seat may be the memory
        of that prompt.
        """
        at_hand, through = self._writer.num_at_hand(service), self.first(service)
        if through is not None:
            wanted = self._unwritten(through)
            return Need(kept=at_hand) if wanted <= at_hand else Need(wanted)  # it may wait for its part alone
        if service is ServiceClass.RT:
            return Need(kept=min(self._promised, at_hand))
        kept, first = self.spoken_for, next(self._queue.waiting.best_effort, None)
        if first is None or self.first(ServiceClass.RT) is not None:
            return Need(kept=kept)
        wanted = self.pages_for(first)
        return Need(kept=at_hand) if wanted <= at_hand - kept else Need(wanted, kept, self._most_pages)

    @property
    def _promised(self) -> int:
        """Return the pages for real-time prompts that run: they were asked for, and may not all have come."""
        return sum(self.pages_for(running) for running in self._asked_for)

    @property
    def _most_pages(self) -> int:
        """Return the pages for the best-effort prompts that wait for a seat, at most as many as the device can fill."""
        limits = self._memory.limits
        most = units_for(limits.num_tokens, limits.page_size)
        wanted = 0
        for running in self._queue.waiting.best_effort:
            wanted += self.pages_for(running)
            if wanted >= most:  # there may be thousands
                return most
        return wanted

    @property
    def spare_pages(self) -> int:
        """Return the pages that are at hand for best-effort prompts, and not for a seated one.

        There are none while a best-effort prompt that is through lacks some.
        """
        if self._pool.member is None or self.first(ServiceClass.BE) is not None:
            return 0
        return self._writer.num_at_hand(ServiceClass.BE) - self.spoken_for

    @property
    def spoken_for(self) -> int:
        """Return the pages of the best-effort prompts that are seated and not through."""
        return sum(self.pages_for(running) for running in self._here.unfinished if not running.promise.is_rt)

    # --- Copies

    def write(self, now: float) -> list[Command]:
        """Copy prompts to the pages that they have; ask for pages where those at hand are too few."""
        pool = self.target
        if pool is None:
            return []
        commands = [command for service in ServiceClass for command in self._write_through(pool, service)]
        commands += self._write_parts(pool)
        for service in ServiceClass:
            asks = self._writer.ask(pool, service, self._need(service))
            if asks and service is ServiceClass.RT:
                self._answered_by = now + ANSWER_S
            commands += asks
        return commands

    def _write_through(self, pool: Member, service: ServiceClass) -> list[Command]:
        """Copy the prompts of this class that wait for pages, one after the other."""
        commands: list[Command] = []
        while (running := self.first(service)) is not None and not self._writer.is_writing(running):
            if self._unwritten(running) > self._writer.num_at_hand(service):
                self._give_up_parts(service)
                break
            self._here.move(running, State.LEAVING)
            commands.append(self._writer.begin(running, pool, running.prefix, service))
        return commands

    def _give_up_parts(self, service: ServiceClass) -> None:
        """Take back the pages of parts because a prompt that is through waits for pages.

        A prompt gives up the pages that it has if it does not get the others before that prompt, or would wait too:
        else two prompts could wait for each other. Best-effort prompts that run have all their pages.
        """
        running = self._here.prompts.values() if service is ServiceClass.RT else ()
        for prompt in (*self.waiting, *running):
            if prompt.request.service is service:
                self._writer.forget_parts(prompt)

    def _write_parts(self, pool: Member) -> list[Command]:
        """Copy full pages of prompts that have more to run, so that little is left to write after the last chunk."""
        commands: list[Command] = []
        limits, prompts = self._memory.limits, self._here.prompts.values()
        size = limits.page_size
        for running in prompts:
            service = running.request.service
            if self.first(service) is not None or limits.unread(running.num_tokens):
                continue  # what is at hand is for prompts that are through; the beginnings of others are dropped
            wanted = self._writer.pages_for(running, running.prefix // size * size)
            count = min(wanted, self._writer.num_at_hand(service))
            if count > 0:
                commands.append(self._writer.begin_part(running, pool, count, service))
        self._asked_for = {running: None for running in self._asked_for if running in prompts}
        return commands

    def copied_out(self, event: CopiedOut, now: float) -> list[Command]:
        copy = self._writer.end_copy(event.number)
        return [] if copy is None else self._end_copy(copy)

    def _end_copy(self, copy: Copy) -> list[Command]:
        """Commit a prompt whose copy has ended, or take its pages back."""
        running = copy.running
        if not copy.wanted or self._pool.member is None:
            self._here.move(running, State.GONE)
            self._memory.give(running.blocks)
            self._writer.take_back(copy)
            return []
        if running.known != copy.known:  # the pool has taken them back: now all is to be copied
            self._writer.take_back(copy)
            self._here.move(running, State.THROUGH, first=True)
            self._memory.reconsider()
            return []
        self._memory.pages.note_in_pool(running)
        self._here.move(running, State.GONE)
        self._memory.give(running.blocks)
        self._outputs.forget([running.request.id])  # the decode worker gets the whole output, and keeps it
        self._writer.hand_on(copy)
        self._holds.discard(running.key)
        self._decisions.note(Kind.COMMITTED, running.request, tokens=running.prefix)
        entry = running.entry(copy.known + copy.pages, self.names_of(running))
        return self._pool.send(Commit(entry, len(copy.known), running.decode))

    def pool_lost(self, event: MemberLost, now: float) -> None:
        """Prompts that were being copied wait to be copied again, once there is a pool."""
        for running in reversed(self._writer.lose_pool()):
            self._here.move(running, State.THROUGH, first=True)
        self._asked_for.clear()
        self._holds.clear()

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        through = self._here.drop_from((State.THROUGH,), request, attempt)
        for running in through:
            self._writer.forget_parts(running)
            self._memory.leave(running.blocks)
        copied = self._writer.drop(request, attempt)
        self._here.drop_from((State.LEAVING,), request, attempt, State.ABANDONED)
        return self._holds.release_all(running.key for running in (*through, *copied))

    def ask_again(self) -> None:
        self._writer.ask_again()

    @property
    def awaits_answer(self) -> bool:
        return self._writer.awaits_the_pool


class Offers(CorePart):
    """Offers prompts to decode workers where no pool is of use."""

    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        log: WorkerLog,
        owners: Owners,
        commits: Commits,
    ) -> None:
        self._pool, self._policy, self._memory, self._writer = pool, memory.pace.policy, memory, pool.writer
        self._peers, self._commits, self._holds = here.peers, commits, pool.holds
        ways = here.peers.get, self._goes_on, self._left
        self.offering = Offering(here, here.departures, memory, log, owners.outputs, *ways, may_be_declined=False)

    def members_changed(self, event: MemberJoined | MemberLost, now: float) -> None:
        self._memory.reconsider()  # prompts that wait for pages may need none now

    @property
    def needs_no_pool(self) -> bool:
        """Return whether KV can be sent to decode workers, and none of them reads the pool of this node, or is to."""
        pool, keeps = self._pool.member, self._policy.handoff is Handoff.DEVICE
        return bool(self._peers) and (keeps or pool is None or not self._peers.has_one_on(pool.node))

    def offer_all(self, now: float) -> list[Command]:
        """Offer all prompts that wait for pages where no pool is of use to them."""
        commands: list[Command] = []
        while self._commits.waiting and self.needs_no_pool:
            running = next(iter(self._commits.waiting))
            decode = self._peers.get(running.decode) or self._peers.any()
            assert decode is not None, "a prompt that needs no pool needs a decode worker"
            self._commits.names_of(running)  # the offer tells them
            commands.append(self.offering.offer(running, decode))
        return commands

    def _goes_on(self, departure: Departure) -> None:
        """Let a prompt wait for pages or another decode worker, as if it had not been offered."""
        running = departure.running
        if self.needs_no_pool and (other := self._peers.any(before=departure.to.name)) is not None:
            running.decode = other.name  # the way there may be broken
        self._commits.add(running)

    def _left(self, running: WorkerRequest, to: str) -> list[Command]:
        self._writer.forget_parts(running)  # its pages go back
        return self._holds.release(running.key)
