"""Pools on two nodes, and a prefill worker on a third: KV goes from node to node, and all holds, whatever fails."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.fuzzing.fuzz import attempt
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.fuzzing.scenario_drawing import draw_narrow_scenario
from alignedserve.lab.loads.workload.load import Arrival
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.machines.fault_drawing import draw_faults
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT
from alignedserve.lab.trials.building import settings_of
from alignedserve.prefill_worker.state import PrefillCore
from tests.conftest import SOAK
from tests.rare import thinned
from tests.samples import request
from tests.simulator.summary import summary_of

NUM_SEEDS = 1000 if SOAK else 32


def on_nodes(seed: int) -> Scenario:
    """Return the seed's scenario, placed on two nodes."""
    drawn = replace(draw_narrow_scenario(seed), topology="2+2", direct=True, nodes=2, faults=())
    return replace(drawn, faults=draw_faults(seed, drawn.members, 4, 1.0, drawn.asks[-1].at + 0.2))


def can_travel(seed: int) -> bool:
    return draw_narrow_scenario(seed).policy.block_use.why_not_direct is None


def test_prompts_of_a_node_without_a_pool_are_finished_by_workers_of_other_nodes() -> None:
    num_steps = 0
    for seed in (45, 93, 108):  # among the first seeds in which there are too few seats for the documents
        scenario = on_nodes(seed)
        scenario = replace(scenario, policy=replace(scenario.policy, helps=False))  # prefill workers run prompts alone
        simulation = Simulation(scenario.settings, [ask.arrival() for ask in scenario.asks])
        assert not summary_of(simulation).problems
        cores = [process.core for process in simulation.world.processes]
        alone = [core for core in cores if isinstance(core, PrefillCore) and core.pool_link.member is None]
        assert all(not core.here.attempts() for core in alone)
        num_steps += sum(core.steps.number for core in alone)
    assert num_steps >= 10, "prompts ran there, where no request decodes"


@pytest.mark.parametrize("part", thinned(range(8), usual=1))
def test_all_holds_on_several_nodes(part: int) -> None:
    seeds = [seed for seed in range(part * NUM_SEEDS // 8, (part + 1) * NUM_SEEDS // 8) if can_travel(seed)]
    for seed in seeds:
        assert attempt(on_nodes(seed)).failure is None, seed
    assert seeds


@pytest.mark.parametrize("seed", thinned([1, 3, 8], usual=1))
def test_no_request_waits_in_a_pool_from_which_no_worker_decodes(seed: int) -> None:
    """The second node has a pool and a prefill worker; the only decode worker is on the first."""
    drawn = replace(draw_narrow_scenario(seed), topology="3+1", direct=True, nodes=2, faults=())
    assert attempt(drawn).failure is None


def test_the_next_turn_of_a_conversation_goes_where_the_turn_before_was() -> None:
    """Placement by the number of requests alone took only half of the reusable tokens from a pool."""
    draw, asked = Random(0), list[Arrival]()
    for number in range(20):
        said = tuple(draw.randrange(10, 5000) for _ in range(2100))
        for turn in range(2):
            at = FIRST_ARRIVAL_AT + 0.05 * number + turn * (3.0 + draw.random())
            new_request = replace(
                request(f"{number}-{turn}", max_tokens=30), prompt=said[: 1800 + 300 * turn], arrival_at=at
            )
            asked.append(Arrival(new_request, 30, None))
    settings = replace(settings_of(SimulationTrial("aligned", "chat", cluster="3+2")), nodes=2, direct=True)
    simulation = Simulation(settings, asked)
    assert not summary_of(simulation).problems
    workers = [process.core for process in simulation.world.processes if isinstance(process.core, DecodeCore)]
    reused = sum(
        core.seats.num_reused_tokens + core.memory.pages.num_shared_tokens for core in workers
    )  # of the pool, of the device
    assert reused >= 0.8 * 20 * 1800
