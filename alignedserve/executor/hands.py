"""The hands of a worker: they perform the commands of its core on the engine.

Steps run on the engine, KV goes to other workers by the transport, and copies are those of `PoolCopies`. With
`look_ahead`, and where steps pause, a thread performs all work in order, so that the core hears messages while a step
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from alignedserve.core import FormOrder, Role, StepPlan, StepResult
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.device.pinning import Cudart
from alignedserve.engine.engine import Engine
from alignedserve.engine.in_order import DeviceQueue
from alignedserve.engine.sampling.reading import Begun
from alignedserve.executor.copies import PoolCopies
from alignedserve.executor.leading import Say, say_nothing
from alignedserve.executor.work_watch import WorkWatch
from alignedserve.kernels.common.decoder import Pauses
from alignedserve.kernels.common.failing import noticing_loss
from alignedserve.machine.energy import EnergyMeter
from alignedserve.protocol.commands import Command, PrepareSyntax, ReceiveKv, RunAmid, RunStep, SendKv
from alignedserve.protocol.events import Event, Post, StepDone, SyntaxReady
from alignedserve.protocol.messages import Member
from alignedserve.protocol.rank_orders import Copying, Meet, Order, PartFrom
from alignedserve.transport.transport import ThroughTheArena, Transport

log = logging.getLogger("alignedserve.engine")


class EngineHands:
    def __init__(
        self,
        engine: Engine,
        arena_path: Path,
        page_size: int,
        verify: bool,
        cudart: Cudart | None = None,
        transport: Transport | None = None,
        pace: CopyPace | None = None,
        num_on_host: int = 0,
        say: Say = say_nothing,
        look_ahead: int = 0,
        watch: WorkWatch | None = None,
        energy: EnergyMeter | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """Pin the arena where there is a `cudart`; copy beside steps at this `pace`; have room on the host for
        `num_on_host` tokens; tell the other ranks with `say` what is done here; tell `watch` of work; ask `energy` what
        steps use; run steps in `pauses` of others."""
        self._engine, self._say = engine, say
        self._in_order = DeviceQueue(engine.device, pauses) if look_ahead or pauses is not None else None
        self._watch, self._energy = watch or WorkWatch(), energy
        self._transport: Transport = transport or ThroughTheArena()
        self._pace = pace or CopyPace()
        self._copies = PoolCopies(
            engine, arena_path, page_size, verify, cudart, self._pace, num_on_host, self._watch.beside
        )

    def close(self) -> None:
        """Finish the work that is under way, but for copies beside the steps, and begin no other."""
        if self._in_order is not None:
            self._in_order.close()
        self._copies.close()

    # --- Members

    def meet(self, member: Member) -> None:
        """Map the arena of a pool, or let KV go to and from a worker, after the work that was ordered before."""
        self._meanwhile(partial(self._meet, member))

    def part_from(self, member: Member) -> None:
        """Unmap the arena of a pool, or end the transfers with a worker, after the work that was ordered before."""
        self._meanwhile(partial(self._part_from, member))

    def _meanwhile(self, work: Callable[[], None]) -> None:
        def watched() -> None:
            with self._watch.between("the mapping of memory"):
                work()

        if self._in_order is not None:
            self._in_order.meanwhile(watched)
        else:
            watched()

    def _meet(self, member: Member) -> None:
        if member.role is Role.POOL or member.transport:
            self._say(Meet(member))
        self._transport.meet(member)
        if member.role is Role.POOL:
            self._copies.attach(member)

    def _part_from(self, member: Member) -> None:
        if member.role is Role.POOL or member.transport:
            self._say(PartFrom(member))
        self._transport.part_from(member)
        if member.role is Role.POOL:
            self._copies.detach()

    # --- Work that goes on beside later work

    def begin_aside(self, work: Command, post: Post) -> bool:
        """Begin work that goes on beside later work, and post its result. False: `perform` it now."""
        if self._in_order is None:
            return self._begin_aside(work, post)
        if isinstance(work, RunStep):
            self._watch.begins(work.plan)
            queue, begin = self._in_order.step, self._engine.begin
            if isinstance(work, RunAmid):
                queue, begin = self._in_order.step_amid, self._engine.begin_amid
            queue(work.plan, partial(self._begin_step, begin), self._watched(post))
        else:
            self._in_order.do(partial(self._begin_aside, work, post), partial(self._perform_and_post, work, post), post)
        return True

    def _begin_aside(self, work: Command, post: Post) -> bool:
        match work:
            case SendKv() | ReceiveKv():
                self._say(work)
                self._transport.start(work, post)
                return True
            case PrepareSyntax(request):
                ready = SyntaxReady(request.id, request.attempt)
                self._engine.prepare_syntax(request.sampling, request.caller, lambda: post(ready))
                return True
        return isinstance(work, Copying) and self._copies.begin_aside(work, post)

    def _watched(self, post: Post) -> Post:
        def ended(done: Event | Exception) -> None:
            if isinstance(done, StepDone):
                self._watch.ends(done.result.number)
                done.joules = self._joules(done.seconds)
            post(done)

        return ended

    def _joules(self, seconds: float) -> float:
        return 0.0 if self._energy is None else self._energy.step(seconds)

    def _begin_step(self, begin: Callable[[StepPlan], Begun], plan: StepPlan) -> Begun:
        with noticing_loss(self._engine.device), self._pace.step():
            begun = begin(plan)
        if begun.has_failed:
            _warn(plan, begun.result())
        return begun

    def _perform_and_post(self, work: Command, post: Post) -> None:
        if (done := self.perform(work)) is not None:
            post(done)

    # --- Work that is done at once

    def perform(self, command: Command) -> Event | None:
        """Perform the command and return its result; DeviceLost where the device computes nothing any more."""
        with noticing_loss(self._engine.device):
            match command:
                case RunStep(plan):
                    began = perf_counter()
                    self._watch.begins(plan)
                    try:
                        with self._pace.step():
                            result = self._engine.step(plan)
                    finally:
                        self._watch.ends(plan.number)
                    _warn(plan, result)
                    seconds = perf_counter() - began
                    return StepDone(result, seconds, self._joules(seconds))
            if isinstance(command, Copying):
                self._say(command)
                tokens = 0 if isinstance(command, FormOrder) else len(command.tokens)
                with self._watch.between(f"a copy of {tokens} tokens", tokens):
                    return self._copies.perform(command)
            raise TypeError(f"a worker cannot perform {command}")

    # --- Another rank

    def follow(self, order: Order) -> None:
        """Do on this rank what rank 0 does on its own."""
        with noticing_loss(self._engine.device):
            match order:
                case RunStep(plan):
                    with self._pace.step():
                        self._engine.step(plan)
                case SendKv() | ReceiveKv():
                    self._transport.start(order, lambda _: None)  # the transport tells rank 0 of its end
                case Meet(member):
                    self.meet(member)
                case PartFrom(member):
                    self.part_from(member)
                case _:
                    self._copies.perform(order)


def _warn(plan: StepPlan, result: StepResult) -> None:
    if result.failure is not None:
        why, tokens = result.failure.why, plan.num_tokens
        log.warning("too little memory for step %d of %d tokens: %s", plan.number, tokens, why)
