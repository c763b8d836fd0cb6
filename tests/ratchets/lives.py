"""Whole lives of requests, as a router's core hears of them; the predictor is `hash`, in another process."""

from __future__ import annotations

from random import Random

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    Backlog,
    Heartbeat,
    Member,
    Message,
    Prefill,
    Progress,
    Report,
    Submit,
)
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.scheduling.sketch import sketch_of
from tests.ratchets.requests import request

_REPORTS = 4  # requests that a decode worker gets between two reports


def member(name: str, role: Role) -> Member:
    return Member(name, role, "local", 1, name)


class Deployment:
    """A router among parts that report as those of a busy deployment do: half of the workers decode."""

    def __init__(self, num_workers: int) -> None:
        self._now = 0.0
        limits = RouterLimits(1 << 30, heartbeat_s=0.5, death_s=1e9, kv_tokens=1 << 30)
        self._router = RouterCore(member(ROUTER, Role.ROUTER), limits, 0.0)
        half = num_workers // 2
        self._decode = [f"decode-{number}" for number in range(half)]
        members = [member("gateway-0", Role.GATEWAY), member("pool-0", Role.POOL)]
        members += [member(f"prefill-{number}", Role.PREFILL) for number in range(half)]
        members += [member(name, Role.DECODE) for name in self._decode]
        for part in members:
            self.receive(part.name, Heartbeat(part))
        for timer in ("gathered", "recovered"):
            self._handle(TimerFired(timer))
        self._draw, self._num_reported = Random(0), 0
        for name in self._decode:
            self._report(name)

    def receive(self, sender: str, message: Message) -> list[Command]:
        return self._handle(Received(sender, message, 1))

    def _handle(self, event: Event) -> list[Command]:
        self._now += 1e-5
        return self._router.handle(event, self._now)

    def begin(self, submit: Submit) -> tuple[str, str]:
        """Submit a request, and return its prefill worker and its decode worker."""
        commands = self.receive("gateway-0", submit)
        [(to, decode)] = [
            (command.to, command.message.decode)
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, Prefill)
        ]
        return to, decode

    def end(self, request: Request, prefill: str, decode: str) -> None:
        """Report to the router that the prompt has run, and that the request has decoded and ended."""
        key = (request.id, 0)
        backlog = Backlog(self._draw.random(), 1e-4, self._draw.random() / 2)
        self.receive(prefill, Progress(backlog=backlog))
        self.receive("pool-0", Progress(committed=(key,)))
        self.receive(decode, Progress(joined=(key,), free_blocks=1000))
        self.receive(decode, Progress(ended=(key,), lengths=(20,), free_blocks=1000))
        if self._draw.random() < 1 / _REPORTS:
            self._report(decode)

    def _report(self, worker: str) -> None:
        shortest = self._draw.randrange(10, 2000)
        band = (shortest, shortest + self._draw.randrange(200))
        self.receive(worker, Report(band, self._draw.randrange(500, 1000), 0.02))


def submits(count: int) -> list[Submit]:
    draw = Random(1)
    made = []
    for number in range(count):
        prompt = tuple(draw.randrange(1, 30_000) for _ in range(draw.randrange(50, 400)))
        is_rt = draw.random() < 0.5
        service = ServiceClass.RT if is_rt else ServiceClass.BE
        asked = request(f"request-{number}", prompt, 256, stop_tokens=(2,), service=service)
        made.append(Submit(asked, sketch_of(prompt)))
    return made
