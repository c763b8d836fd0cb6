"""The pool's core: it owns page numbers, and decides which waiting requests a decode worker gets next.

    AskPages ─▶ LeasePages ─▶ (the worker writes) ─▶ Commit ─▶ waiting ─▶ Batch ─▶ out ─▶ Release
                                                       │          ▲                 │      ▲
                                                       │          └─ worker lost, ──┘      │
                                                       │             or Commit: the worker gave it up
                                                       └── the worker has it already (Kept), ─┘
                                                           or the request cannot wait for an ask (Batch):
                                                           on arrival, or when the slack has run out

grouping.py decides which request is next. A lost worker's lease ends when its lock is free, not before: until then the
worker may still be writing. Asks for pages are answered in the order of arrival; asks for spare pages come after the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from alignedserve.core import Entry, Role, ServiceClass
from alignedserve.kvpool.grouping import WaitingEntry, waiters
from alignedserve.kvpool.memory.compression import pages_of, rewriting_of
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.protocol.cancelled import CancelledAttempts
from alignedserve.protocol.commands import Command, Send, SetTimer, WatchHolder
from alignedserve.protocol.events import (
    AtWork,
    Event,
    HolderGone,
    LinkGap,
    MemberJoined,
    MemberLost,
    Received,
    TimerFired,
)
from alignedserve.protocol.extents import Extents
from alignedserve.protocol.figures import PagesFor
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    AskPrefix,
    Attempt,
    Backlog,
    Batch,
    Cancel,
    Commit,
    Figures,
    GiveBack,
    Holding,
    Inquire,
    Keep,
    Kept,
    LeasePages,
    Missed,
    Prefix,
    Progress,
    Release,
    Spoiled,
    holder,
)
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy

REFRESH_S = 5.0  # between two inquiries after requests that workers have
LAST_WORDS_S = 0.05  # in which the router hears what a lost worker said last, and cancels what had joined there
_REFRESH, _LOOK, _LAST_WORDS = "refresh", "look", "last words"  # timers


@dataclass(frozen=True)
class _PageAsk:
    holder: str
    ask: AskPages


class PoolCore:
    def __init__(
        self, extents: Extents | int, block_size: int, policy: Policy = DEFAULT_POLICY, at_work: AtWork | None = None
    ) -> None:
        """Start with these extents; a plain number is a number of pages, all of kind KV."""
        self._policy, self._at_work = policy, at_work or AtWork()
        extents = Extents(extents) if isinstance(extents, int) else extents
        self._pages = pages_of(extents)
        # worker -> its ask for pages that could not be answered yet, in the order of arrival
        self._page_asks: dict[str, _PageAsk] = {}
        self._spare: dict[str, bool] = {}  # worker with spare pages -> whether it was told to give them back
        self._waiting = waiters(policy, block_size, lambda: (entry.request for _, entry in self._out.values()))
        self.rewriting = rewriting_of(policy, self._pages, self._waiting)
        self._has_changed = False  # whether requests or asks have changed since batches were looked for
        self._looks_at: float | None = None  # when a request's slack may run out: a timer is set
        self._pauses_until = 0.0  # nothing is handed out before
        self._out: dict[str, tuple[str, Entry]] = {}  # request -> (decode worker that has it, entry)
        self._held: dict[str, tuple[str, Attempt]] = {}  # request -> (worker for which the pages are held, attempt)
        self._decode_workers: set[str] = set()
        self._asks: dict[str, AskBatch] = {}  # decode worker -> the room, in the order of the asks
        self._progress: dict[str, list[Attempt]] = {}
        self._refreshing = False  # whether the refresh timer is set
        self._cancelled = CancelledAttempts()

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        self.rewriting.hear(event)
        match event:
            case Received(worker, AskPages() as ask, incarnation):
                self._pages.keep_only(holder(worker, incarnation), ask.kept)
                if not (ask.is_spare and ask.pages):
                    self._spare.pop(worker, None)
                earlier = self._page_asks.get(worker)
                if earlier is not None and earlier.ask.is_spare is not ask.is_spare:
                    del self._page_asks[worker]
                wanted = _PageAsk(holder(worker, incarnation), ask)
                self._page_asks[worker] = wanted  # takes the place of the worker's earlier ask of the same kind
            case Received(worker, AskPrefix() as ask):
                commands.append(Send(worker, self._hold_prefix(worker, ask)))
            case Received(message=Spoiled(pages)):
                for page in pages:
                    self._pages.forget(page)
            case Received(worker, Commit(entry, num_known, to), incarnation):
                commands += self._commit(worker, holder(worker, incarnation), entry, num_known, to, now)
            case Received(worker, Keep() as keep, incarnation):
                commands += self._keep(worker, holder(worker, incarnation), keep)
            case Received(worker, AskBatch() as room):
                self._asks.pop(worker, None)
                if room.requests or room.wants_batch or room.ahead:  # otherwise the worker has no room any more
                    self._asks[worker] = room
                self._has_changed = True
            case Received(worker, Release(request, attempt, to)):
                commands += self._release(worker, request, attempt, to)
            case Received(message=Cancel(request, attempt)):
                commands += self._cancel(request, attempt)
            case MemberJoined(member) if member.role in (Role.PREFILL, Role.DECODE):
                self._decode_workers.update([member.name] if member.role is Role.DECODE else [])
                if self._pages.leased_to(member.holder):
                    self._spare[member.name] = False  # it was given up for dead, and still has spare pages
            case MemberLost(member) if member.role in (Role.PREFILL, Role.DECODE):
                self._decode_workers.discard(member.name)
                commands += [*self._worker_lost(member.name, now), WatchHolder(member.holder)]
            case HolderGone(gone):
                self._pages.holder_gone(gone)
            case MemberJoined(member) if member.role is Role.ROUTER:
                commands += [self._holding(), Send(ROUTER, self._figures())]
            case Received(message=Inquire(attempts)):
                commands += self._answer_inquiry(attempts)
            case Received(sender, Missed()):
                commands += self._say_again(sender)
            case LinkGap(sender):
                commands += [Send(sender, Missed()), *self._say_again(sender)]
            case TimerFired(name) if name == _REFRESH:
                self._refreshing = False
                out = {at for at, _ in (*self._out.values(), *self._held.values())}
                for worker in sorted(out.union(self.rewriting.working, self._asked_back)):
                    commands += self._say_again(worker)
                commands.append(Send(ROUTER, self._figures()))
            case TimerFired(name) if name == _LOOK:
                self._looks_at, self._has_changed = None, True
            case TimerFired(name) if name == _LAST_WORDS:
                self._has_changed = True
        commands += self._leases() + self._batches(now)
        commands += self.rewriting.orders(now)
        return commands + self._look_later(now) + self._refresh_later(now) + self._report()

    @property
    def held(self) -> dict[str, int]:
        """Return what the pool holds now, without leases: nothing when no request is open."""
        return {
            "entries": len(self._waiting) + len(self._out) + len(self._held),
            "pages": self._pages.num_stored + self.rewriting.num_under_way,
            "unanswered asks": sum(not asked.ask.is_spare for asked in self._page_asks.values()),
        }

    @property
    def kept(self) -> set[str]:
        """Return the requests that have KV here."""
        return {*(waiting.id for waiting in self._waiting), *self._out, *self._held}

    @property
    def out(self) -> Mapping[str, set[Attempt]]:
        """Return the attempts that the pool believes each decode worker to have."""
        at: dict[str, set[Attempt]] = {}
        for worker, entry in self._out.values():
            at.setdefault(worker, set()).add(_attempt(entry))
        return at

    @property
    def held_for(self) -> Mapping[str, set[Attempt]]:
        """Return the attempts for which the pool holds first pages, by worker."""
        by: dict[str, set[Attempt]] = {}
        for worker, attempt in self._held.values():
            by.setdefault(worker, set()).add(attempt)
        return by

    @property
    def pages(self) -> Pages:
        """Return the pages, for reading only."""
        return self._pages

    @property
    def num_lent_pages(self) -> int:
        return self._pages.num_leased

    def _figures(self) -> Figures:
        return Figures(
            self._pages.usage,
            num_compressed=self.rewriting.num_rewritten,
            num_incompressible=self.rewriting.num_refused,
            holders=self._holders,
        )

    @property
    def _holders(self) -> tuple[PagesFor, ...]:
        """Return how many pages each worker has for requests; first, how many wait here for a worker."""
        kept, leased = Counter[str](), Counter[str]()
        for worker, entry in self._out.values():
            kept[worker] += len(entry.pages)
        for request, (worker, _) in self._held.items():
            kept[worker] += len(self._pages.pages_of(request))
        kept[""] = sum(len(waiting.entry.pages) for waiting in self._waiting)
        for name, pages in self._pages.leases:
            leased[name.rpartition(".")[0]] += pages
        return tuple(PagesFor(worker, leased[worker], kept[worker]) for worker in sorted({*kept, *leased}))

    def _leases(self) -> list[Command]:
        """Answer asks for pages; no ask overtakes another, and spare pages are leased only while no other ask waits."""
        commands: list[Command] = []
        for worker, wanted in [item for item in self._page_asks.items() if not item[1].ask.is_spare]:
            pages = self._pages.lease(wanted.holder, wanted.ask.pages)
            while pages is None and self._held and not self._spare:
                commands.append(self._take_back(self._last_holding))
                pages = self._pages.lease(wanted.holder, wanted.ask.pages)
            if pages is None:
                return commands + self._recall()
            commands.append(self._lease(worker, pages))
        for worker, wanted in list(self._page_asks.items()):
            # Half of the free pages, so that the next ask rarely has to wait until spare pages come back.
            spare = min(wanted.ask.pages, (self._pages.num_free + 1) // 2)
            if spare or not wanted.ask.pages:
                commands.append(self._lease(worker, self._pages.lease(wanted.holder, spare) or ()))
                self._spare |= {worker: False} if spare else {}
        return commands

    def _lease(self, worker: str, pages: tuple[int, ...]) -> Command:
        return Send(worker, LeasePages(pages, self._page_asks.pop(worker).ask.number))

    def _recall(self) -> list[Command]:
        """Ask workers to return spare pages; tell each worker once per lease."""
        recalled = [worker for worker, told in self._spare.items() if not told]
        self._spare |= dict.fromkeys(recalled, True)
        return [Send(worker, GiveBack()) for worker in recalled]

    @property
    def _asked_back(self) -> list[str]:
        """Return the workers that were told to give spare pages back and have not done so yet."""
        return [worker for worker, told in self._spare.items() if told]

    def _commit(self, worker: str, by: str, entry: Entry, num_known: int, to: str, now: float) -> list[Command]:
        """Take over a request from a worker: from now on the request waits here."""
        request = entry.request
        new, names = entry.pages[num_known:], entry.names[num_known:]
        held = self._take_prefix(entry, num_known) or self._take_returned(worker, entry, num_known)
        taken_back = held != entry.pages[:num_known]  # before the worker heard of that: others may have the prefix now
        unwanted = taken_back or self._is_elsewhere(worker, entry) or self._latest(request.id) > request.attempt
        if unwanted or (request.id, request.attempt) in self._cancelled:
            self._pages.give_back(by, new)
            if held:
                self._pages.free_entry(request.id)
            self._note("lost", entry)
            return []
        if not held:
            self._forget(request.id)
        self._pages.adopt(by, new, request.id, names, request.service)
        entry = replace(entry, pages=self._pages.pages_of(request.id))
        self._note("committed", entry)
        decodes = worker in self._decode_workers
        waiting = self._waiter(entry, now, to or (worker if decodes else ""))
        if decodes and to in self._decode_workers:  # handed on by another decode worker, to a worker with room
            is_rt = waiting.promise.is_rt
            return self._batch(to, [waiting], is_pinned=is_rt, is_dynamic=not is_rt)
        self._waiting.add(waiting)
        self.rewriting.waits(request.id)
        self._has_changed = True
        return []

    def _take_returned(self, worker: str, entry: Entry, num_known: int) -> tuple[int, ...]:
        """Return the full pages of a request that a worker gives back; the last page is written again, with more."""
        name = entry.request.id
        known = self._pages.pages_of(name)[:num_known]
        if not known or not self._is_out(worker, *_attempt(entry)) or entry.pages[:num_known] != known:
            return ()
        del self._out[name]
        self._pages.shorten(name, num_known)
        return known

    def _is_elsewhere(self, worker: str, entry: Entry) -> bool:
        """Return whether another worker has the request now, since the pool took this worker for dead."""
        out = self._out.get(entry.request.id)
        return out is not None and out[0] != worker and _attempt(out[1]) == _attempt(entry)

    def _keep(self, worker: str, by: str, keep: Keep) -> list[Command]:
        """Keep full pages of a request, after the pages that are here: for the worker, or idle from now on."""
        name, attempt = keep.request, (keep.request, keep.attempt)
        is_held = self._held.get(name) == (worker, attempt)
        if not (is_held or self._is_out(worker, *attempt)):
            if keep.num_known or self._latest(name) >= keep.attempt:
                self._pages.give_back(by, keep.pages)
                return []
            self._forget(name)
        elif len(self._pages.pages_of(name)) < keep.num_known or (keep.goes_on and not is_held):
            self._pages.give_back(by, keep.pages)
            return []
        else:
            self._pages.shorten(name, keep.num_known)
        self._pages.adopt(by, keep.pages, name, keep.names, keep.service)
        if keep.goes_on:
            self._held[name] = (worker, attempt)
            return [Send(worker, Kept(*attempt, self._pages.pages_of(name)))]
        self._out.pop(name, None)
        self._held.pop(name, None)
        self._pages.free_entry(name)
        return []

    def _is_out(self, worker: str, request: str, attempt: int) -> bool:
        at, entry = self._out.get(request, ("", None))
        return entry is not None and (at, entry.request.attempt) == (worker, attempt)

    def _batches(self, now: float) -> list[Command]:
        if not self._has_changed or now < self._pauses_until:
            return []
        self._has_changed = False
        commands: list[Command] = []
        for worker, room in list(self._asks.items()):
            handed = self._waiting.next_for(worker, room, now)
            if handed.all:
                del self._asks[worker]
            commands += self._batch(worker, handed.pinned, is_pinned=True)
            commands += self._batch(worker, handed.dynamic, is_dynamic=True)
            commands += self._batch(worker, handed.batch)
        return commands + self._straight_on()

    def _straight_on(self) -> list[Command]:
        """Send requests that cannot wait to the decode worker that the router named or that gave them back, while no
        other worker asks for more.

        There they have a claim to memory that comes free, which prompts and growing requests would take otherwise."""
        asking = {worker for worker, ask in self._asks.items() if ask.requests}
        leaving = [
            waiting
            for waiting in self._waiting.pinned
            if waiting.to in self._decode_workers and not asking - {waiting.to}
        ]
        for waiting in leaving:
            self._waiting.remove(waiting.id)
        return [command for waiting in leaving for command in self._batch(waiting.to, [waiting], is_pinned=True)]

    def _batch(
        self, worker: str, requests: Sequence[WaitingEntry], is_pinned: bool = False, is_dynamic: bool = False
    ) -> list[Command]:
        entries = tuple(self._hand_out(waiting, worker) for waiting in requests)
        return [Send(worker, Batch(entries, is_pinned, is_dynamic))] if entries else []

    def _hand_out(self, waiting: WaitingEntry, worker: str) -> Entry:
        self._at_work.on((_attempt(waiting.entry),))
        entry = replace(waiting.entry, due=waiting.promise.due, pages=self._pages.pages_of(waiting.id))
        self.rewriting.waits_no_longer(waiting.id)
        self._out[waiting.id] = (worker, entry)
        return entry

    def _hold_prefix(self, worker: str, ask: AskPrefix) -> Prefix:
        """Hold the prefix that is here for the request until a Commit or a Release.

        The answer is empty where a later attempt is here.
        """
        attempt = (ask.request, ask.attempt)
        held = self._held.get(ask.request)
        if held == (worker, attempt):
            return Prefix(*attempt, self._pages.pages_of(ask.request))
        if self._latest(ask.request) >= ask.attempt:
            return Prefix(*attempt, ())
        self._forget(ask.request)
        pages = self._pages.hold(ask.request, ask.names, ask.service)
        if pages:
            self._held[ask.request] = (worker, attempt)
        return Prefix(*attempt, pages)

    def _take_prefix(self, entry: Entry, num_known: int) -> tuple[int, ...]:
        """Hand the pages that were held for this attempt to its entry; return none that the entry does not name."""
        name = entry.request.id
        if self._held.get(name, ("", None))[1] != _attempt(entry):
            return ()
        pages = self._pages.pages_of(name)[:num_known]
        if not pages or entry.pages[: len(pages)] != pages:  # the answer was lost, and the worker has computed them
            self._let_go_of_prefix(name)
            return ()
        del self._held[name]
        self._pages.shorten(name, len(pages))
        return pages

    def _let_go_of_prefix(self, request: str) -> None:
        del self._held[request]
        self._pages.free_entry(request)

    @property
    def _last_holding(self) -> str:
        """Return the request that loses its held prefix first, for an ask that waits.

        A prompt that holds pages and waits for room must not block a prompt that has room and waits for pages. Prefixes
        of best-effort prompts go before prefixes of real-time prompts. The pool knows only the order of arrival: within
        a class the last prompt has the longest expected wait.
        """
        held = [*reversed(self._held)]
        return next((request for request in held if self._pages.class_of(request) is ServiceClass.BE), held[0])

    def _take_back(self, request: str) -> Command:
        worker, attempt = self._held[request]
        self._let_go_of_prefix(request)
        return Send(worker, Prefix(*attempt, ()))

    def _latest(self, request: str) -> int:
        """Return the newest attempt of the request that has pages here; -1 for none."""
        if (waiting := self._waiting.get(request)) is not None:
            return waiting.request.attempt
        if request in self._out:
            return self._out[request][1].request.attempt
        return self._held[request][1][1] if request in self._held else -1

    def _waiter(self, entry: Entry, now: float, to: str = "") -> WaitingEntry:
        return WaitingEntry(entry, promise(entry.request, self._policy, len(entry.output), entry.due), now, to)

    def _release(self, worker: str, request: str, attempt: int, to: str) -> list[Command]:
        """Free the pages of a request that has left a worker, or hold the first pages for the worker that has it
        now."""
        if self._is_out(worker, request, attempt):
            del self._out[request]
            self._pages.free_entry(request)
        elif self._held.get(request) == (worker, (request, attempt)):
            if to in self._decode_workers:
                self._held[request] = to, (request, attempt)
                return [Send(to, Kept(request, attempt, self._pages.pages_of(request)))]
            self._let_go_of_prefix(request)
        return []

    def _cancel(self, request: str, attempt: int) -> list[Command]:
        self._cancelled.add(request, attempt)
        waiting = self._waiting.get(request)
        if waiting is not None and waiting.request.attempt <= attempt:
            self._forget(request)
        out = self._out.get(request)
        if out is not None and out[1].request.attempt <= attempt:
            return [Send(out[0], Cancel(request, attempt))]  # the worker keeps the pages until it releases them
        return []

    def _worker_lost(self, name: str, now: float) -> list[Command]:
        """Put the requests of a lost worker back to the front; the router cancels those that had joined there.

        A request that has ended this worker would end the next one, too. So the pool drops what the router has
        cancelled, and hands out nothing until the router can have cancelled the others."""
        self._asks.pop(name, None)
        self._page_asks.pop(name, None)
        self._spare.pop(name, None)
        self._waiting.forget_worker(name)
        entries = [entry for worker, entry in self._out.values() if worker == name]
        for entry in entries:
            del self._out[entry.request.id]
            if _attempt(entry) in self._cancelled:
                self._pages.free_entry(entry.request.id)
            else:
                self.rewriting.waits(entry.request.id)
        self._waiting.back(self._waiter(entry, now) for entry in entries if _attempt(entry) not in self._cancelled)
        for request in [request for request, (worker, _) in self._held.items() if worker == name]:
            self._let_go_of_prefix(request)
        self._has_changed = True
        if not entries:
            return []
        self._pauses_until = now + LAST_WORDS_S
        return [SetTimer(_LAST_WORDS, self._pauses_until)]

    def _forget(self, request: str) -> None:
        """Drop an earlier attempt of the request, wherever that is."""
        self._has_changed = True
        self.rewriting.waits_no_longer(request)
        if self._waiting.remove(request) or self._out.pop(request, None) or self._held.pop(request, None):
            self._pages.free_entry(request)

    def _look_later(self, now: float) -> list[Command]:
        """Set a timer for when the slack of a waiting request may run out."""
        at = self._waiting.looks_at(now)
        if at is None or (self._looks_at is not None and self._looks_at <= at):
            return []
        self._looks_at = at
        return [SetTimer(_LOOK, at)]

    # --- After lost frames

    def _refresh_later(self, now: float) -> list[Command]:
        awaited = self._out or self._held or self.rewriting.num_under_way or self._asked_back
        if self._refreshing or not awaited:
            return []
        self._refreshing = True
        return [SetTimer(_REFRESH, now + REFRESH_S)]

    def _holding(self) -> Command:
        entries = [*(waiting.entry for waiting in self._waiting), *(entry for _, entry in self._out.values())]
        return Send(ROUTER, Holding(tuple(map(_attempt, entries))))

    def _say_again(self, to: str) -> list[Command]:
        """Make up for lost frames to or from a member.

        A worker repeats its asks by itself. A Batch, a Prefix or a GiveBack to it, or a Release by it may be lost.
        """
        if to == ROUTER:
            return [self._holding()]
        out = [_attempt(entry) for worker, entry in self._out.values() if worker == to]
        held = [attempt for worker, attempt in self._held.values() if worker == to]
        inquiry: list[Command] = [Send(to, Inquire((*out, *held)))] if out or held else []
        asked_back = [Send(to, GiveBack())] if to in self._asked_back else []
        return [*asked_back, *inquiry, *self.rewriting.say_again(to)]

    def _answer_inquiry(self, attempts: Iterable[Attempt]) -> list[Command]:
        """Answer the router's inquiry: about a request that a worker has, the pool asks that worker."""
        commands: list[Command] = []
        for request, attempt in attempts:
            waiting, out = self._waiting.get(request), self._out.get(request)
            if out is not None and out[1].request.attempt == attempt:
                commands.append(Send(out[0], Inquire(((request, attempt),))))
            elif waiting is None or waiting.request.attempt != attempt:
                self._progress.setdefault("unknown", []).append((request, attempt))
        return commands

    def _note(self, stage: str, entry: Entry) -> None:
        self._progress.setdefault(stage, []).append(_attempt(entry))

    def _report(self) -> list[Command]:
        if not self._progress:
            return []
        stages = {stage: tuple(keys) for stage, keys in self._progress.items()}
        self._progress.clear()
        return [Send(ROUTER, Progress(**stages, lengths=(), free_blocks=0, backlog=Backlog()))]


def _attempt(entry: Entry) -> Attempt:
    return entry.request.id, entry.request.attempt
