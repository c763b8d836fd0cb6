"""A machine keeps its default promise where it is defined: a prompt of 1,000 tokens beside seven chats that decode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from alignedserve.core import Request, Sampling, ServiceClass, Slo, WorkerLimits
from alignedserve.cost.model import Coefficients, Uncertainty
from alignedserve.cost.promising import OTHERS, PROMPT, machine_promise
from alignedserve.lab.benchmarks.common.machines import MACHINES, Machine, save_profile
from alignedserve.lab.loads.figures.request_figures import gaps_s, ttft_s
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import settings_of

ROOM = WorkerLimits(num_blocks=2000, block_size=16, page_size=64, max_step_tokens=512, max_batch=16)
LARGE = Machine(Coefficients(fixed=0.1, token=(6e-3,), decode=1e-3, prefix=2e-6), ROOM, Uncertainty(0.04, 0.1))
LARGER = Machine(Coefficients(fixed=0.5, token=(3e-2,), decode=5e-3, prefix=1e-5), ROOM, Uncertainty(0.04, 0.1))


def arrival(number: int, at: float, output: int, slo: Slo) -> Arrival:
    prompt = tuple(Random(number).choices(range(30_000), k=PROMPT))
    sampling, rt = Sampling(), ServiceClass.RT
    request = Request(f"chat-{number}", "gateway-0", 0, prompt, (), sampling, output, (), rt, slo, at)
    return Arrival(request, output, None)


@pytest.mark.parametrize("machine", [MACHINES["amx"], LARGE, LARGER], ids=["amx", "large", "larger"])
def test_a_prompt_beside_seven_chats(machine: Machine, tmp_path: Path) -> None:
    save_profile(path := tmp_path / "steps.json", replace(machine, limits=ROOM))
    settings = settings_of(SimulationTrial("aligned", profile=str(path)))
    assert settings.belief is not None
    promise = machine_promise(settings.belief().model, settings.limits, 8192)
    patient = Slo(1e4, promise.tbt_s, is_asked=False)
    calm_at = 20 * promise.ttft_s  # by then all of the first seven decode
    others = [arrival(number, 2.0 + number * promise.ttft_s, 2000, patient) for number in range(OTHERS)]
    asked = [*others, arrival(OTHERS, calm_at, 50, promise)]
    simulation = Simulation(replace(settings, record=False, most_s=calm_at + 3 * promise.ttft_s), asked=asked)
    simulation.run()
    chats = {client.id: client for client in simulation.clients.records()}
    assert ttft_s(chats[f"chat-{OTHERS}"]) <= promise.ttft_s
    for number in range(OTHERS):
        gaps = gaps_s(chats[f"chat-{number}"])
        assert percentile(gaps[-200:], 99) <= promise.tbt_s
