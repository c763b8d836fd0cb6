"""Requests that come to a decode worker as candidates, from the pool and from prefill workers (then joining.py)."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Entry, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.cancelled import CancelledAttempts
from alignedserve.protocol.commands import Command, PrepareSyntax, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, Received, SyntaxReady
from alignedserve.protocol.messages import AskBatch, Attempt, Batch, Cancel, Decline, Kept, Member, Offer, Release
from alignedserve.scheduling.policy import Grouping, Room
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.requests import PRESENT
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.request import JoinCandidate
from alignedserve.worker.step.states import State

_STOCK = 8  # with 64 seats, 8 candidates wait to join as others end


class Intake(WorkerPart):
    """Takes candidates in, from the pool in a batch, or offered by the worker that ran the prompt; tells the pool how
    much room there is for more."""

    def __init__(self, worker: Worker, direct: bool) -> None:
        super().__init__(worker)
        # KV comes from device to device to blocks that no other request may enter meanwhile.
        self._is_direct = direct and self._policy.block_use.why_not_direct is None
        self._cancelled = CancelledAttempts()
        self._asked: AskBatch | None = None  # what the pool knows of the room here

    def syntax_ready(self, event: SyntaxReady, now: float) -> None:
        if (candidate := self._candidates.find((event.request, event.attempt), State.CANDIDATE)) is not None:
            candidate.awaits_syntax = False

    def cancel(self, message: Cancel, frame: Received, now: float) -> None:
        self._cancelled.add(message.request, message.attempt)

    def peer_joined(self, event: MemberJoined, now: float) -> None:
        if self._is_direct and event.member.transport:
            self._candidates.peers[event.member.name] = event.member

    def peer_lost(self, event: MemberLost, now: float) -> None:
        """Forget a worker, and the candidates that lose their KV with the worker.

        Requests that had to leave are recomputed. A transfer from this worker ends by a separate event."""
        peer = event.member
        self._candidates.peers.pop(peer.name, None)
        self._lose([of for of in self._candidates.waiting if of.source == peer and not of.is_evicted])

    def pool_lost(self, event: MemberLost, now: float) -> None:
        self._asked = None
        for running in self._here.of(State.CANDIDATE, State.RECEIVING):
            if running.candidate is not None:
                running.candidate.came = replace(running.candidate.came, pages=())
        self._lose([candidate for candidate in self._candidates.waiting if candidate.source is None])

    def _lose(self, candidates: list[JoinCandidate]) -> None:
        for candidate in candidates:
            self._candidates.forget_copy(candidate)
            self._here.move(candidate.running, State.GONE)
            self._notes.note("lost", candidate.key)

    # --- From the pool

    def take_batch(self, batch: Batch, frame: Received, now: float) -> list[Command]:
        """Take what the pool hands out as candidates.

        A pool that took this worker for dead may hand out again an attempt that is here, which goes on. A pool that
        others took for dead may hand out an attempt after the next attempt has come here: the older is released.
        """
        self._asked = None
        pool, is_request = frame.sender, batch.is_pinned or batch.is_dynamic
        if not is_request and batch.entries:
            self._batch.comes([entry.num_held for entry in batch.entries])
        over = list[Command]()
        for entry in batch.entries:
            key = name, attempt = entry.request.id, entry.request.attempt
            newest = self._here.newest(name)
            if newest > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._holds.add(key)
            if newest == attempt:
                self._note_pages(key, entry)
            else:
                found_for = self._batch.tag(entry.num_held, self._here.with_kv) if batch.is_dynamic else 0
                number = 0 if is_request else self._batch.num_batches
                over += self._add(entry, None, now, batch.is_pinned, number, found_for)
        return over

    def _note_pages(self, attempt: Attempt, entry: Entry) -> None:
        """Note the pool's pages of this attempt; a candidate that did not leave here has no more KV than these hold."""
        candidate = self._candidates.find(attempt, State.CANDIDATE, State.RECEIVING)
        if candidate is None or candidate.is_evicted:
            return
        candidate.came = entry
        if candidate.transfer is None:
            self._memory.resume(candidate.running, entry)
            candidate.source = None if candidate.partner is None else candidate.source

    def _add(
        self,
        entry: Entry,
        source: Member | None,
        now: float,
        is_pinned: bool = False,
        batch: int = 0,
        found_for: int = 0,
    ) -> list[Command]:
        """Add a candidate, which joins once its syntax is compiled."""
        running = running_of(self._policy, entry.request, entry.output, entry.due)
        self._memory.resume(running, entry)
        running.promise.served(now)  # the request waits from now on
        due_at = running.promise.due_at(now)
        candidate = JoinCandidate(running, entry, source, due_at, now, is_pinned, batch, found_for)
        sender = source or self._pool.member
        how = "pinned" if is_pinned else "in a batch" if batch else "for the running batch" if found_for else "offered"
        name, ahead = "" if sender is None else sender.name, len(self._candidates)
        since_s = 0.0 if source else now - entry.request.arrival_at
        self._decisions.note(Kind.CANDIDATE, entry.request, name, entry.prefix, ahead, since_s, why=how)
        candidate.awaits_syntax = bool(entry.request.sampling.syntax)
        self._candidates.add(candidate)
        return [PrepareSyntax(entry.request)] if candidate.awaits_syntax else []

    def note_copy(self, kept: Kept, frame: Received, now: float) -> list[Command]:
        """Note that the pool holds the first pages of a request: only what comes after is still to be written."""
        attempt = (kept.request, kept.attempt)
        running = self._here.find_attempt(attempt, *PRESENT)
        if running is None:
            return self._holds.decline(attempt, now)
        self._holds.add(attempt)  # released too where the copy under way is wanted no more
        if running.state in (State.COMPILING, State.ASKING, State.LEAVING):
            return []
        if running.state is State.CANDIDATE and not (running.candidate and running.candidate.is_evicted):
            return []  # the candidate came with all pages
        if running.num_lost:
            return self._holds.release(attempt)
        if not self._writer.num_written(running):
            full = len(running.request.tokens) // self._limits.page_size  # of the prompt, as it was handed on
            running.kept_in_pool(kept.pages[:full], kept.names[:full])
        return []

    # --- From another worker

    def consider(self, offer: Offer, frame: Received, now: float) -> list[Command]:
        """Take the offer, or decline it. A candidate that is not declined waits its turn at the sender.

        The sender repeats the offer until the request is pulled, or until the sender has an answer."""
        entry, sender = offer.entry, frame.sender
        source, name, attempt = self._candidates.peers.get(sender), entry.request.id, entry.request.attempt
        if self._here.newest(name) >= attempt or self._candidates.has_come((name, attempt)):
            is_asked = self._here.find_attempt((name, attempt), State.CANDIDATE, State.RECEIVING) is not None
            return [] if is_asked else [Send(sender, Cancel(name, attempt))]  # the sender has nothing to send any more
        if (name, attempt) in self._cancelled:
            return [Send(sender, Cancel(name, attempt))]  # the sender may not have heard of the end
        is_taken = not offer.has_pool or self._has_room_beyond(entry)
        if source is None or self._here.is_retiring or not is_taken:
            return [Send(sender, Decline(name, attempt))]
        return self._add(entry, source, now)

    def _has_room_beyond(self, entry: Entry) -> bool:
        """Return whether there is room for this entry and for all candidates that wait already."""
        here, waiting = self._here, self._candidates
        if self._queue.waiting or here.had_shortage or here.is_reserved:
            return False
        if here.num_seated + len(waiting) >= self._limits.max_batch:
            return False
        is_whole, size = self._policy.room is Room.WHOLE, self._limits.block_size
        taken = (entry, *here.among(State.CANDIDATE))
        tokens = [of.request.most_tokens if is_whole else of.num_held + 1 for of in taken]
        return sum([units_for(each, size) for each in tokens]) <= self._memory.num_free

    # --- The room for more, as the pool is told

    def ask(self, now: float) -> list[Command]:
        """Tell the pool of the room here whenever it has changed.

        A worker that has preempted a request has no room until another request ends. Prompts of chats, and requests
        that had to leave and wait here, come before candidates."""
        if self._pool.member is None or (self._queue.waiting.come_first and not self._policy.swaps):
            return []
        room = self._room
        offers = (room.requests > 0 and room.blocks + room.rt_blocks > 0) or room.wants_batch or room.ahead > 0
        here, told = self._here, self._asked
        is_closed = here.had_shortage or here.is_retiring or here.is_reserved
        if room == told or not (offers or (told is not None and is_closed)):
            return []
        self._asked = room
        is_starving = self._candidates.is_starving(now)
        return self._pool.send(
            replace(
                room,
                times=self._pace.times,
                copy_token_s=self._pace.copy_token_s,
                all_blocks=self._limits.num_blocks,
                most_requests=self._limits.max_batch,
                band=None if is_starving else self._batch.band(self._here.with_kv),
                wait_s=self._batch.mean_join_s,
            )
        )

    @property
    def _room(self) -> AskBatch:
        """Return the room beyond the waiting candidates. Where that is no block, real-time requests may find some."""
        is_closed, swaps = self._here.is_retiring or self._here.is_reserved, self._policy.swaps
        if is_closed or self._here.had_shortage:
            return AskBatch(0, 0, wants_batch=False, ahead=self._wanted_ahead if swaps and not is_closed else 0)
        num_seated, blocks = self._here.num_seated, 0 if self._candidates else self._memory.num_free
        rt_blocks = self._memory.blocks_for_rt(offered=blocks)
        if rt_blocks and any(candidate.is_rt for candidate in self._candidates.waiting):
            rt_blocks = 0
        is_open = self._policy.grouping is Grouping.ALIGNED  # to batches, which keep together
        return AskBatch(
            blocks,
            max(0, self._limits.max_batch - num_seated) if blocks + rt_blocks else 0,
            rt_blocks=rt_blocks,
            wants_batch=is_open and not self._candidates.batch,
            ahead=self._wanted_ahead if is_open or swaps else 0,
        )

    @property
    def _wanted_ahead(self) -> int:
        """Return how many candidate requests to ask for: more are asked for when half of them have joined."""
        most, here = max(1, self._limits.max_batch // _STOCK), len(self._candidates.requests)
        return most - here if self._here.num_seated and 2 * here <= most else 0

    def ask_again(self) -> None:
        self._asked = None

    @property
    def awaits_answer(self) -> bool:
        return self._asked is not None
