"""The real job runner in a simulated deployment: any of its lives may be killed, frozen or cut off.

    users ─▶ store ◀─▶ JobRunner on a virtual event loop ─▶ Owner ─▶ owner's core ─▶ router, workers

Only the answers are modelled: the request of a line has given tokens in place of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

from alignedserve.config.config import Config
from alignedserve.config.sections import JobsConfig
from alignedserve.core import Role, ServiceClass, Slo
from alignedserve.jobs.actor import JobRunner
from alignedserve.jobs.answering import RUNS_AT, LineRequest
from alignedserve.jobs.messages import JobCommand, JobEvent
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.simulator.job_users import MODEL, JobUsers, SubmittedJob
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.machines.event_loop import VirtualLoop
from alignedserve.lab.simulator.machines.faults import JOBS
from alignedserve.lab.simulator.machines.process import ProcessClock, ProcessSetup
from alignedserve.lab.simulator.machines.world import World
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.owner.core import OwnerCore
from alignedserve.owner.shell import Owner
from alignedserve.protocol.commands import Command, Deliver, Reject
from alignedserve.protocol.events import Closed, Event, Opened
from alignedserve.protocol.messages import Member
from alignedserve.shell.part import Part
from alignedserve.shell.turn import NoHands
from alignedserve.store.storage import Storage
from alignedserve.store.store import Holder


class JobWitness(Protocol):
    """Sees what the job runner's core hears and orders."""

    def begins_life(self) -> None: ...

    def told(self, event: JobEvent, simulation: JobRunnerSimulation, /) -> None: ...

    def ordered(self, command: JobCommand, simulation: JobRunnerSimulation, /) -> None: ...


class JobRunnerSimulation(Simulation):
    """A simulation with a job runner. It ends when all requests and all jobs have ended."""

    def __init__(
        self,
        settings: Settings,
        asked: Iterable[Arrival],
        jobs: Sequence[SubmittedJob],
        most_open: int,
        witness: JobWitness,
    ) -> None:
        super().__init__(settings, asked)
        self.witness = witness
        self.users = JobUsers(self.world, settings.seed, jobs, self._end_job)
        self.clients.num_open += len(jobs)
        self._config = Config(topology=settings.topology, jobs=JobsConfig(most_open=most_open))
        self._runner: _WatchedRunner | None = None  # of the present life

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._end_life()
            self.users.leave()

    @property
    def lives(self) -> Mapping[Role, Callable[[World, Member], ProcessSetup]]:
        return {**super().lives, Role.JOBS: self.job_runner}

    def job_runner(self, world: World, member: Member) -> ProcessSetup:
        """Begin a life: its loop, its owner on a simulated part, and the runner."""
        seed = f"{self.settings.seed}/{member.holder}"
        loop = VirtualLoop(world.agenda, seed, partial(_stands_still_until, world, member))
        part = _OwnerPart(self, member, self._config, loop)
        self._runner = runner = _WatchedRunner(_Answers(self, member, part.owner), self._config, part, loop, self)
        self.witness.begins_life()
        world.agenda.at(world.agenda.now, Priority.CLIENT, lambda: loop.begin(runner.serve()))
        return ProcessSetup(part.core, part, [])

    def _died(self, name: str) -> None:
        super()._died(name)
        if name == JOBS:
            self._end_life()

    def _end_life(self) -> None:
        if self._runner is not None:
            self._runner.loop.kill()

    def _end_job(self) -> None:
        self.clients.num_open -= 1

    def _check(self) -> None:
        super()._check()
        if self._runner is not None:
            held = self._runner.held
            self.problems += [f"the job runner still has {count} {what}" for what, count in held.items() if count]
        self.problems += self.users.problems()

    # --- What witnesses may ask

    def is_open(self, job: str) -> bool:
        stored = self.users.store.find(job)
        return stored is not None and stored.is_open

    def has_result(self, job: str, line: int) -> bool:
        return self.users.store.has_result(job, line)

    def open_lines(self, job: str) -> list[str]:
        """Return the requests of the job's lines that have not ended."""
        kept = self.clients.kept
        return [id for id in kept if id.startswith(f"{job}/") and kept[id].outcome is RequestOutcome.OPEN]

    def line_of(self, request: str) -> Arrival:
        """Return the line that a request asks."""
        job, number, _ = request.split("/")
        return self.users.jobs[job].line(int(number))


def _stands_still_until(world: World, member: Member) -> float:
    process = world.alive(member.name)
    return process.frozen_until if process is not None else 0.0


class _OwnerPart(NoHands):
    """Stands for the part that the owner belongs to, and for its shell: the simulated process runs the owner's core."""

    def __init__(self, simulation: JobRunnerSimulation, member: Member, config: Config, loop: VirtualLoop) -> None:
        self._simulation, self._agenda, self._loop = simulation, simulation.world.agenda, loop
        self.member, self.spec, self.config = member, member, config
        self.clock = ProcessClock(self._agenda, simulation.world.trouble.ahead_s(member.name))
        self.core = OwnerCore(frozenset())  # the owner brings its own
        self.owner = Owner(cast(Part, self))

    def shell(self, core: OwnerCore, _: object, **__: object) -> _OwnerPart:
        self.core = core
        return self

    def post(self, event: Event) -> None:
        if self._loop.is_dead:
            return
        match event:
            case Opened(request):
                line = replace(self._simulation.line_of(request.id), request=request)
                event = replace(event, request=self._simulation.clients.enter(line))
            case Closed(request):
                self._simulation.clients.left(request)
        self._agenda.at(self._agenda.now, Priority.CLIENT, partial(self._simulation.post_to, self.member, event))

    def perform(self, command: Command) -> None:
        """Hand what the owner's core delivers to the client that checks it, and to the line that waits for it."""
        match command:
            case Deliver():
                self._simulation.deliver(command)
            case Reject():
                self._simulation.reject(command)
        self.owner.perform(command)


class _Answers:
    """Answers lines by requests to the simulated deployment."""

    def __init__(self, simulation: JobRunnerSimulation, member: Member, owner: Owner) -> None:
        self._simulation, self._member, self._owner = simulation, member, owner
        self._serials = count()

    def serves(self, model: object) -> bool:
        return model == MODEL

    async def answer(self, line: LineRequest, on_running: Callable[[], None]) -> dict[str, Any]:
        id = f"{line.body['job']}/{line.body['line']}/{self._member.incarnation}.{next(self._serials)}"
        request = replace(
            self._simulation.line_of(id).request,
            id=id,
            owner=self._member.name,
            service=ServiceClass.BE,
            slo=Slo(jct_s=line.jct_s),
            arrival_at=self._owner.now(),
            estimate=line.estimate,
        )
        tokens: list[int] = []
        async with aclosing(self._owner.open(request)) as deliveries:
            async for delivered in deliveries:
                has_run = len(tokens) >= RUNS_AT
                tokens += delivered.tokens
                if not has_run and len(tokens) >= RUNS_AT:
                    on_running()
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(tokens)}
        return {"tokens": tokens, "usage": usage}


class _WatchedRunner(JobRunner):
    """The job runner; its witness sees what its core hears and orders."""

    def __init__(
        self, answers: _Answers, config: Config, part: _OwnerPart, loop: VirtualLoop, simulation: JobRunnerSimulation
    ) -> None:
        holder, now = Holder(part.member.name, part.member.incarnation), part.clock.now
        super().__init__(answers, config, holder, now, now)
        self._simulation, self.loop = simulation, loop

    async def _open(self) -> None:
        users = self._simulation.users
        self._opened = Storage(users.store, users.blobs, self._holder)

    def _begin(self, work: Coroutine[Any, Any, None], group: dict[asyncio.Task[None], None]) -> None:
        super()._begin(work, group)
        self.loop.watch(next(reversed(group)))

    def _deliver(self, event: JobEvent) -> None:
        self._witness(lambda: self._simulation.witness.told(event, self._simulation))
        super()._deliver(event)

    def _perform(self, command: JobCommand) -> None:
        self._witness(lambda: self._simulation.witness.ordered(command, self._simulation))
        super()._perform(command)

    def _witness(self, see: Callable[[], None]) -> None:
        """Let the witness see it. What it raises ends the run: the runner would take it for the failure of a line."""
        try:
            see()
        except Exception as error:
            self.loop.fail(error)
