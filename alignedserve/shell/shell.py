"""The shell of every part: the turn loop of a real process, with its sockets, clock and threads.

links ──▶ events ──▶ core.handle(event, now) ──▶ commands ──▶ links, timers, the hands of the part
             ▲                                                              │
             └──────────────────── results of work ─────────────────────────┘
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from alignedserve.core import Entry, Request
from alignedserve.errors import AlignedServeError, WireError
from alignedserve.protocol import messages
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import AtWork, Event, Post, StepDone, Unsent, attempts_of
from alignedserve.protocol.form_messages import Evict, Prefetched
from alignedserve.protocol.membership import membership_of
from alignedserve.shell.clock import Clock
from alignedserve.shell.links import LinkFull, Links
from alignedserve.shell.process import OwnProcess
from alignedserve.shell.turn import Core, CoreInTwo, Decide, Hands, NoHands, TurnLoop

log = logging.getLogger("alignedserve.shell")
journal = logging.getLogger("alignedserve.requests")  # where a request goes next; no line quotes its text

# Begin work that goes on beside later work and post its result, or the exception that it fails with.
# False: the shell performs the work itself.
BeginAside: TypeAlias = Callable[[Command, Post], bool]


class Shell(TurnLoop):
    """The turn loop of a process. `begin_aside` is given by parts whose work may go on beside later work."""

    def __init__(
        self,
        core: Core,
        links: Links,
        clock: Clock,
        hands: Hands | None = None,
        begin_aside: BeginAside | None = None,
        lives: Iterable[messages.Life] = (),
        give_up_on: Callable[[Event], list[Command] | None] = lambda _: None,
        at_work: AtWork | None = None,
    ) -> None:
        """`lives` are those that the launcher had started when a router starts. What `give_up_on` returns is
        done where the core has failed at an event and goes on."""
        super().__init__(core, hands or NoHands(), membership_of(links.name, links.incarnation, lives), clock)
        self._links, self._begin_aside, self._own = links, begin_aside, OwnProcess()
        self._give_up_on, self._at_work = give_up_on, at_work or AtWork()
        self._in_two = core if isinstance(core, CoreInTwo) else None
        self._posted: deque[Event | Exception] = deque()  # results of work, and what other threads post

    def run(self, first: Iterable[Command] = (), turns: Callable[[], None] = lambda: None) -> None:
        """Run the part until `stop`, or until the router has cast it out; call `turns` at each turn.

        The whole system is read from here: every process is this loop around a core. A turn (`TurnLoop.turn`) hears
        the events, fires the timers that are due and begins one piece of work; the core decides in `handle` what
        follows from each event. Cores to read next: router, prefill_worker, decode_worker and kvpool, each `state.py`.
        """
        self.perform(first)
        while self.alive:
            turns()
            has_more = bool(self._work or self._posted)
            patience_s = self._clock.until(self._next_timer_at) if self._timers else None  # without limit
            events = self._arrived(0.0 if has_more else patience_s)
            self.turn(events)

    def post(self, posted: Event | Exception) -> None:
        """Deliver an event of this process, or end the process with an exception. Any thread may call this."""
        self._posted.append(posted)
        self._links.wake()

    def wake(self) -> None:
        """Have a turn taken soon. Any thread may call this."""
        self._links.wake()

    def stop(self) -> None:
        """End `run` after the present turn. Any thread may call this, also before `run`."""
        self.alive = False
        self._links.wake()

    def _arrived(self, patience_s: float | None) -> Iterator[Event]:
        """Yield the messages that have arrived, then what was posted: a result of work comes after the messages
        that arrived during the work."""
        yield from self._links.receive(patience_s, self._at_work.on if self._at_work.outlives else None)
        while self._posted:
            posted = self._posted.popleft()
            if isinstance(posted, Exception):
                raise posted
            yield posted

    def _deliver(self, event: Event) -> None:
        before = self._at_work.attempts  # a message that could not be sent is an event amid another's commands
        self._at_work.on(attempts_of(event))
        try:
            super()._deliver(event)
        except AlignedServeError:
            self._at_work.on(())  # no request is the cause
            raise
        self._at_work.on(before)

    def _decisions(self, event: Event) -> Sequence[Decide]:
        """Have the tokens of a step sent before the next step is planned: other processes hand them on meanwhile."""
        if self._in_two is not None and isinstance(event, StepDone):
            return partial(self._in_two.hear, event), self._in_two.act
        return super()._decisions(event)

    def _failed(self, event: Event, error: BaseException) -> Iterable[Command]:
        if isinstance(error, AlignedServeError):
            raise error
        commands = self._give_up_on(event)
        if commands is None:
            if (felled := self._at_work.attempts) and self._links.name != messages.ROUTER:
                self.perform([Send(messages.ROUTER, messages.Progress(felled=felled))])
            raise error
        log.error("%s has failed at an event of one request, and gives it up", self._links.name, exc_info=error)
        return commands

    def _begin(self, work: Command) -> None:
        if self._begin_aside is not None and self._begin_aside(work, self.post):
            return
        done = self.hands.perform(work)
        if done is not None:
            self._posted.append(done)

    def _end(self) -> None:
        self.stop()

    def _wake_at(self, at: float) -> float:
        """Return the time as it is: `run` waits no longer than until the next timer."""
        return at

    def _connect(self, member: messages.Member) -> None:
        self._links.connect(member.name, member.address, member.incarnation)
        if member.name == messages.ROUTER and self._at_work.left:
            self._send(messages.ROUTER, messages.Progress(felled=self._at_work.left))

    def _disconnect(self, name: str) -> None:
        self._links.disconnect(name)

    def _send(self, to: str, message: messages.Message) -> None:
        if isinstance(message, messages.Figures) and message.process is None:  # else it is another part's, handed on
            message = replace(message, process=self._own.figures(self._clock.now()))
        note(to, message)
        try:
            self._links.send(to, message)
        except LinkFull as error:
            log.error("%s", error)  # the receiver sees the gap in the numbers of its frames: LinkGap
        except Exception as error:  # a WireError, or what no part of the message should have made possible
            is_told = isinstance(error, WireError)
            log.error("%s", error if is_told else "a message cannot be sent", exc_info=None if is_told else error)
            self._deliver(Unsent(to, message, str(error)))


def note(to: str, message: messages.Message) -> None:
    """Log a line for each request that this message moves on, with the id that is also the answer's x-request-id.

    An ordinary move is for `log.level` debug: each request has some, and a log should not fill its disk."""
    level = logging.INFO if isinstance(message, (messages.Refused, messages.AttemptLost)) else logging.DEBUG
    if journal.isEnabledFor(level):
        for request, attempt, what in _moves(to, message):
            journal.log(level, what, extra={"fields": {"request_id": request, "attempt": attempt}})


def _moves(to: str, message: messages.Message) -> Iterator[tuple[str, int, str]]:
    """Yield (request, attempt, what happens)."""
    match message:
        case messages.Submit(request):
            yield *_attempt_of(request), "submitted"
        case messages.Prefill(request):
            yield *_attempt_of(request), f"goes to {to}"
        case messages.Commit(Entry(request=request)):
            yield *_attempt_of(request), f"goes to {to}"
        case messages.Batch(entries):
            for entry in entries:
                yield *_attempt_of(entry.request), f"goes to {to}"
        case messages.Pull(_, request_id, attempt):
            yield request_id, attempt, f"is pulled from {to}"
        case Evict(Entry(request=request)):
            yield *_attempt_of(request), f"is to leave for {to}"
        case Prefetched(attempts):
            yield from ((*attempt, f"is prefetched for {to}") for attempt in attempts)
        case messages.Progress(ended=ended, lost=lost, unknown=unknown):
            yield from ((*attempt, "ended") for attempt in ended)
            yield from ((*attempt, "lost") for attempt in (*lost, *unknown))
        case messages.Refused(request_id, attempt):
            yield request_id, attempt, "refused"
        case messages.AttemptLost(request_id, attempt):
            yield request_id, attempt, "lost: its owner is to start the next attempt"
        case messages.Cancel(request_id, attempt) if to == messages.ROUTER:
            yield request_id, attempt, "cancelled"


def _attempt_of(request: Request) -> tuple[str, int]:
    return request.id, request.attempt
