"""The owner inside the gateway and the job runner: its core in a thread, beside their event loop.

event loop ── open(request) ──▶ Opened ──▶ core, on a shell of its own ──▶ router, workers
    ▲                                                     │
    └────────── Delivered, one after the other ◀── Deliver, Reject
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import TypeAlias

from alignedserve.config.sections import ServerConfig
from alignedserve.core import NO_OPENING, Rejection, Request, Role, Sketch
from alignedserve.errors import AlignedServeError, CastOut
from alignedserve.explain.story import Story
from alignedserve.owner.accounts import MOST_SETTLING
from alignedserve.owner.arrivals import ArrivalQueues
from alignedserve.owner.client import Culprit, CutOff, Delivered, GivenUp, InLine, Overloaded, Settle, ignore
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Charge, Command, Deliver, Reject, Show, TellPlace, TellStory
from alignedserve.protocol.events import Closed, Event, Opened, Paused, Resumed, StoryAsked
from alignedserve.protocol.messages import Figures, Member
from alignedserve.scheduling.policy import Predictor
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.shell.part import Part
from alignedserve.shell.shell import Shell
from alignedserve.shell.turn import NoHands
from alignedserve.signs import ExitCode

log = logging.getLogger("alignedserve.owner")

_Arrived: TypeAlias = Deliver | Reject | TellPlace | TellStory | AlignedServeError
_MOST_STORIES = 4  # told at once: each costs every part a look through its ring


class Owner(NoHands):
    """The owner's core on a shell of its own. It implements `OwnerClient` for the event loop."""

    def __init__(self, part: Part) -> None:
        needed = {Role.ROUTER, Role.DECODE}
        if not part.config.topology.colocated:
            needed |= {Role.POOL} if part.config.lends else {Role.PREFILL, Role.POOL}
        self.name = part.spec.name
        server, is_usual = part.config.server, part.config.server.port == ServerConfig().port
        self._place = "" if is_usual else f" --port {server.port}"  # where a command asks
        if server.tls_cert is not None:
            self._place = f" --url https://localhost:{server.port}"
        self._part, self._is_predicted = part, part.config.policy.predictor is Predictor.HASH
        self._sketched: tuple[Sequence[int], Sketch | None] = (), None  # the last prompt, with sketch
        # A gateway that starts again hears of the workers in a moment: the first requests wait for that.
        lost_at = part.clock.now() if part.member.incarnation > 1 else -math.inf
        self._core = OwnerCore(frozenset(needed), lost_at)
        self._shell: Shell = part.shell(self._core, self, give_up_on=self._core.give_up_on)
        # None: cut off
        self._arrivals = ArrivalQueues[_Arrived | None]()
        self._settles = Settles()
        self._stories, self._story_numbers = asyncio.Semaphore(_MOST_STORIES), count(1)
        self.on_figures: Callable[[Figures], None] = lambda _: None  # in the owner's thread
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._shell.stop()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._part.run(self._shell)
        except BaseException as error:
            if isinstance(error, CastOut):
                log.error("%s", error)
                os._exit(ExitCode.CAST_OUT)
            log.exception("the owner of the requests has failed")
            os._exit(ExitCode.BROKEN)  # without it no request would ever end; the launcher starts another process

    @property
    def ready(self) -> bool:
        return self._core.ready

    @property
    def lacks_s(self) -> float:
        return self._core.lacks_s(self.now())

    def away_s(self, role: Role) -> float:
        """Return for how long no member of this role has been there."""
        return self._core.away_s(role, self.now())

    @property
    def members(self) -> tuple[Member, ...]:
        others = (member for member in self._core.members if member.name != self.name)
        return (*others, self._part.member)

    @property
    def late(self) -> dict[str, float]:
        return self._core.late

    @property
    def num_open(self) -> int:
        return self._core.num_open

    def now(self) -> float:
        return self._part.clock.now()

    async def open(self, request: Request, settle: Settle = ignore) -> AsyncGenerator[Delivered, None]:
        ended = False
        with self._arrivals.waiting_for(request.id) as arrivals:
            self._shell.post(Opened(request, self._sketch(request)))
            self._settles.begin(request.id, settle)
            try:
                while not ended:
                    arrived = await arrivals.get()
                    if arrived is None:
                        raise CutOff
                    if isinstance(arrived, AlignedServeError):
                        raise arrived
                    assert not isinstance(arrived, TellStory)
                    if isinstance(arrived, TellPlace):
                        yield Delivered((), None, place=InLine(arrived.num_before, arrived.seconds))
                        continue
                    ended = isinstance(arrived, Reject) or arrived.finish is not None
                    if isinstance(arrived, Reject):
                        if arrived.reason is Rejection.CULPRIT:
                            raise Culprit(arrived.why)
                        command = f"alignedserve explain {request.id}{self._place}"
                        if arrived.reason is Rejection.GIVEN_UP:
                            raise GivenUp(arrived.why, arrived.retry_after_s, command)
                        raise Overloaded(arrived.why, arrived.retry_after_s, arrived.reason, command)
                    of_first = arrived.opening or NO_OPENING, arrived.is_infeasible
                    yield Delivered(arrived.tokens, arrived.finish, arrived.logprobs, *of_first, arrived.spent)
            finally:
                self._settles.end(request.id)
                if not ended:
                    self._shell.post(Closed(request.id))

    def _sketch(self, request: Request) -> Sketch | None:
        """Return the sketch of a request's prompt, which all choices of a prompt share.

        It takes less time than a thread would take to begin it."""
        if request.pooling is not None or not self._is_predicted:
            return None
        if request.prompt is not self._sketched[0]:
            self._sketched = request.prompt, sketch_of(request.prompt)
        return self._sketched[1]

    def pause(self, request: str) -> None:
        self._shell.post(Paused(request))

    def resume(self, request: str) -> None:
        self._shell.post(Resumed(request))

    def has_unread(self, request: str) -> bool:
        return self._arrivals.has(request)

    def end(self, request: str, error: AlignedServeError) -> None:
        self._arrivals.put(request, error)

    async def story(self, request: str) -> Story:
        number = next(self._story_numbers)
        async with self._stories:
            with self._arrivals.waiting_for(_story_name(number)) as arrivals:
                self._shell.post(StoryAsked(number, request))
                told = await arrivals.get()
        if told is None:
            raise CutOff
        assert isinstance(told, TellStory)
        return told.story

    def cut_off(self) -> None:
        """End every stream with an error. Only the event loop may call this."""
        self._arrivals.put_to_all(None)

    def perform(self, command: Command) -> Event | None:
        """Hand a command of the core to the event loop. The shell calls this in the owner's thread."""
        if isinstance(command, Show):
            self.on_figures(command.figures)
            return None
        if isinstance(command, TellStory):
            self._arrivals.put(_story_name(command.number), command)
            return None
        if isinstance(command, Charge):
            self._arrivals.call(partial(self._settles.charge, command))
            return None
        assert isinstance(command, Deliver | Reject | TellPlace), f"an owner cannot perform {command}"
        self._arrivals.put(command.request, command)
        return None


class Settles:
    """Tells the makers of requests what these have used, also after a request's early end. For the event loop alone."""

    def __init__(self) -> None:
        self._open: dict[str, Settle] = {}  # by request
        self._ended: dict[str, Settle] = {}  # the last MOST_SETTLING, in the order of their ends

    def begin(self, request: str, settle: Settle) -> None:
        self._open[request] = settle

    def end(self, request: str) -> None:
        self._ended.pop(request, None)
        self._ended[request] = self._open.pop(request)
        if len(self._ended) > MOST_SETTLING:
            del self._ended[next(iter(self._ended))]

    def charge(self, charge: Charge) -> None:
        settle = self._open.get(charge.request) or self._ended.get(charge.request)
        if settle is not None:
            settle(charge.spent)


def _story_name(number: int) -> str:
    return f"story {number}"


class Halt:
    """A stop that any thread may call, also before there is an event loop, and that the event loop waits for."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said = threading.Event()
        self._heard = asyncio.Event()

    def say(self) -> None:
        self._said.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._heard.set)

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self._said.is_set():  # from now on `say` sees the loop
            await self._heard.wait()
