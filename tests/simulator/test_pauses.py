"""A simulated worker's step pauses at the end of a layer, as on a CPU: chats wait less, and nobody loses a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import ServiceClass, WorkerLimits
from alignedserve.lab.fuzzing.fuzz import attempt, prepared
from alignedserve.lab.fuzzing.scenario import Ask, Scenario
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.simulator.machines.engine import Costs
from alignedserve.lab.simulator.machines.faults import Freeze
from alignedserve.lab.simulator.machines.world import NetworkDelays
from alignedserve.papers.policy import PaperPolicy

LIMITS = WorkerLimits(num_blocks=200, block_size=16, page_size=32, max_step_tokens=256, max_batch=8)
COSTS = Costs(step_s=0.005, token_s=0.001)


def scenario(layers: int) -> Scenario:
    """Return a document of 200 tokens, in the step of which two chats come."""
    chat = Ask(1, 3.1, "gateway-0", 20, 5, 10)
    asks = (
        Ask(0, 3.0, "gateway-0", 200, 5, 10, ServiceClass.BE),
        chat,
        replace(chat, number=2, at=3.14),
    )
    drawn = replace(
        draw_scenario(3), topology="colocated", num_gateways=1, nodes=1, limits=LIMITS, asks=asks, faults=()
    )
    policy, network = PaperPolicy(reuse=False), NetworkDelays(1e-4, 1e-4)
    drawn = replace(drawn, jobs=(), policy=policy, costs=COSTS, network=network, num_pages=64, direct=False)
    return replace(drawn, layers=layers, look_ahead=0)


def first_tokens(layers: int) -> list[float]:
    ran = scenario(layers)
    simulation = prepared(ran)
    simulation.run()
    assert not simulation.problems
    return [simulation.clients.kept[f"request-{ask.number}"].token_at[0] - ask.at for ask in ran.asks]


def test_chats_wait_for_a_layer_and_the_document_for_the_chats() -> None:
    document_s, *chats_s = first_tokens(0)
    paused_s, *amid_s = first_tokens(10)
    layer_s = (0.005 + 200 * 0.001) / 10
    alone_s = 0.005 + 20 * 0.001
    assert all(alone_s < chat_s < alone_s + layer_s + 0.01 for chat_s in amid_s)
    assert all(amid < before - 0.03 for amid, before in zip(amid_s, chats_s, strict=True))
    assert paused_s == pytest.approx(document_s + 2 * alone_s, abs=0.01)


@pytest.mark.parametrize("reuse", [False, True])
def test_chats_of_one_step_write_to_no_block_that_is_still_to_be_copied(reuse: bool) -> None:
    """A prefill worker hands a chat on after its pause: the copy waits for the step, and the next chat does not."""
    ran = scenario(10)
    chats = (replace(ran.asks[1], number=number, at=3.0 + 0.04 * number) for number in range(1, 6))
    policy = PaperPolicy(reuse=reuse, helps=False)
    assert attempt(replace(ran, topology="1+1", asks=(ran.asks[0], *chats), policy=policy)).failure is None


def test_a_process_that_stands_still_in_a_pause_goes_on() -> None:
    frozen = replace(scenario(10), faults=(Freeze(3.12, "decode-0", 0.5),))
    assert attempt(frozen).failure is None
