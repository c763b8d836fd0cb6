"""Tests of the fuzzer's rules: each sees what breaks it, in a run in which all else is well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from alignedserve.core import FinishReason, Rejection
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.fuzz import prepared
from alignedserve.lab.fuzzing.invariants import STALLED_S, Failure, InvariantWatch, Rule
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.fuzzing.worker_views import kept_blocks
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.simulator.machines.process import Process
from alignedserve.lab.simulator.run import Simulation
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, Deliver, ReceiveKv, Reject, Send
from alignedserve.protocol.messages import ROUTER, Prefill, Refused


class Watched(NamedTuple):
    """A run that has stopped while requests decode, and a watch that has seen nothing of it yet."""

    simulation: Simulation
    watch: InvariantWatch

    @property
    def worker(self) -> Process:
        """Return a worker that keeps full pages, to whose blocks nothing is written any more."""
        return next(
            process
            for process in self.simulation.world.processes
            if isinstance(process.core, DecodeCore) and kept_blocks(process.core)
        )

    @property
    def core(self) -> DecodeCore:
        assert isinstance(self.worker.core, DecodeCore)
        return self.worker.core

    def commands(self, *commands: Command) -> None:
        for command in commands:
            self.watch.commanded(self.worker.member, command, b"")

    def breaks(self, rule: Rule) -> pytest.RaisesExc[Failure]:
        return pytest.raises(Failure, match=f"^{rule.value}: ")


def scenarios() -> Iterator[Scenario]:
    for seed in range(60):
        drawn = draw_scenario(seed)
        yield replace(drawn, faults=(), jobs=(), topology="1+1", nodes=1, num_gateways=1)


@pytest.fixture
def run() -> Watched:
    """Return a run with an open request that has tokens to come, and with full pages on a worker."""
    for scenario in scenarios():
        simulation = prepared(scenario)
        simulation.run_until(scenario.asks[len(scenario.asks) // 2].at + 0.3)
        found = Watched(simulation, InvariantWatch(scenario, simulation))
        keeps = any(isinstance(each.core, DecodeCore) and kept_blocks(each.core) for each in simulation.world.processes)
        if keeps and open_requests(found):
            return found
    raise AssertionError("no scenario stops in the midst of a request")


def open_requests(run: Watched) -> list[str]:
    kept = run.simulation.clients.kept
    return [name for name, client in kept.items() if client.outcome is RequestOutcome.OPEN and client.story.output]


def test_a_run_in_which_all_is_well_breaks_none(run: Watched) -> None:
    for process in run.simulation.world.processes:
        run.watch.handled(process)


@pytest.mark.parametrize("command", [CopyIn, ReceiveKv])
def test_nothing_is_written_to_the_blocks_of_full_pages(run: Watched, command: type[CopyIn | ReceiveKv]) -> None:
    blocks = (min(kept_blocks(run.core)),)
    written = CopyIn(1, "", (), blocks, ()) if command is CopyIn else ReceiveKv(1, "prefill-0.1", blocks, ())
    with run.breaks(Rule.BLOCKS):
        run.watch.works(run.worker, written)


def test_a_block_is_free_or_taken_once(run: Watched) -> None:
    assert run.core.memory.blocks.take(1) is not None, "that no request has"
    with run.breaks(Rule.BLOCKS):
        run.watch.handled(run.worker)


def test_a_worker_uses_only_what_is_leased_to_it(run: Watched) -> None:
    pool = run.simulation.world.alive("pool-0")
    assert pool is not None
    assert isinstance(pool.core, PoolCore)
    foreign = max(set(pool.core.pages.all_numbers) - pool.core.pages.leased_to(run.worker.member.holder))
    with run.breaks(Rule.LEASES):
        run.watch.works(run.worker, CopyOut(1, pool.member.holder, (), (foreign,), ()))


def test_pages_of_an_earlier_life_of_the_pool_are_nobodys(run: Watched) -> None:
    run.watch.works(run.worker, CopyOut(1, "pool-0.0", (), (0,), ()))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_client_gets_its_own_tokens_once(run: Watched, repeated: bool) -> None:
    name = open_requests(run)[0]
    first = run.simulation.clients.kept[name].story.output[:1]
    wrong = [Deliver(name, first, None)] * 2 if repeated else [Deliver(name, (first[0] + 1,), None)]
    with run.breaks(Rule.TOKENS):
        run.commands(*wrong)


def test_nothing_follows_an_end(run: Watched) -> None:
    name = open_requests(run)[0]
    run.commands(Deliver(name, (), FinishReason.STOP))
    with run.breaks(Rule.ENDS_ONCE):
        run.commands(Deliver(name, run.simulation.clients.kept[name].story.output[:1], None))
    with run.breaks(Rule.ENDS_ONCE):
        run.commands(Reject(name, Rejection.QUEUED, "full", 1.0))


def test_what_was_placed_is_not_refused(run: Watched) -> None:
    client = run.simulation.clients.kept[open_requests(run)[0]]
    run.commands(Send("prefill-0", Prefill(client.request)))
    with run.breaks(Rule.REFUSALS):
        run.commands(Send("gateway-0", Refused(client.request.id, 0, Rejection.QUEUED, "full", 1.0)))


def test_what_was_refused_does_not_run(run: Watched) -> None:
    client = run.simulation.clients.kept[open_requests(run)[0]]
    run.commands(Reject(client.request.id, Rejection.QUEUED, "full", 1.0))
    with run.breaks(Rule.REFUSALS):
        run.commands(Send("prefill-0", Prefill(client.request)))


def test_something_moves_while_requests_are_open(run: Watched) -> None:
    router = run.simulation.world.alive(ROUTER)
    assert router is not None
    agenda = run.simulation.world.agenda
    began_at = agenda.now
    agenda.now += STALLED_S - 1.0
    run.commands(ReceiveKv(1, "prefill-0.1", (), ()))
    agenda.now += STALLED_S - 1.0
    run.watch.handled(router)
    agenda.now += 2.0
    assert agenda.now > began_at + STALLED_S
    with pytest.raises(Failure, match=f"^({Rule.PROGRESS.value}|{Rule.PATIENCE.value}): "):
        run.watch.handled(router)
